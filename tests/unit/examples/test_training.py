import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

pytest.importorskip("peft")
pytest.importorskip("transformers")

from examples import training
from examples.data import Dataset, Example
from examples.gguf_folder import Gguf, write_folder
from examples.training import Recipe, load_base, train

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

EXAMPLES = tuple(
    Example(f"say {word}", f"{word} {word}") for word in ("a", "bc", "the", "theft", "cab", "zoo", "q", "w")
)
DATASET = Dataset(EXAMPLES[:6], EXAMPLES[6:])
RECIPE = Recipe(
    "echo", rank=2, targets=("q_proj", "up_proj"), num_steps=3, batch_size=1, learning_rate=1e-2, rank_of={"q_proj": 4}
)


@pytest.fixture
def loaded(tiny_gguf: Path, tmp_path: Path) -> tuple[Any, Any]:
    folder = tmp_path / "base"
    folder.mkdir()
    write_folder(Gguf.open(tiny_gguf), folder, "acme/tiny", lambda _done, _total: None)
    return load_base(folder)


def test_an_adapter_is_written_in_float16_with_its_ranks_and_no_local_path(
    loaded: tuple[Any, Any], tmp_path: Path
) -> None:
    train(*loaded, RECIPE, DATASET, tmp_path / "echo")
    assert sorted(path.name for path in (tmp_path / "echo").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    text = (tmp_path / "echo" / "adapter_config.json").read_text()
    config = json.loads(text)
    assert str(tmp_path) not in text
    assert (config["r"], config["lora_alpha"]) == (2, 4)
    assert (config["rank_pattern"], config["alpha_pattern"]) == ({"q_proj": 4}, {"q_proj": 8})
    tensors = load_file(tmp_path / "echo" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {np.dtype(np.float16)}
    assert tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"].shape == (4, 64)


def test_training_again_gives_the_same_bytes_and_leaves_the_base_as_it_was(
    loaded: tuple[Any, Any], tmp_path: Path
) -> None:
    before = {name: value.clone() for name, value in loaded[0].state_dict().items()}
    losses = [train(*loaded, RECIPE, DATASET, tmp_path / str(run)) for run in range(2)]
    assert losses[0] == losses[1]
    files = [(tmp_path / str(run) / "adapter_model.safetensors").read_bytes() for run in range(2)]
    assert files[0] == files[1]
    after = loaded[0].state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_only_the_reply_and_the_end_of_turn_count(loaded: tuple[Any, Any]) -> None:
    _, tokenizer = loaded
    batch = training._pad([training._encode(tokenizer, example) for example in EXAMPLES[:2]])
    for row, example in enumerate(EXAMPLES[:2]):
        counted = batch.labels[row][batch.labels[row] != -100]
        assert tokenizer.decode(counted) == f"{example.completion}<|im_end|>"
    assert batch.mask.sum(dim=1).tolist() == [len(training._encode(tokenizer, example)[0]) for example in EXAMPLES[:2]]


def test_the_learning_rate_warms_up_and_then_falls_to_zero() -> None:
    rates = [training._schedule(step, 100) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == rates[10] == 1
    assert rates[100] == pytest.approx(0)
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[10:]))
