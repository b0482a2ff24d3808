"""Tokens and logits equal to PEFT's on tiny models: ranks and scales by pattern, rsLoRA, some modules, some layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from common.adapter_format.base import BaseLinears
from tests.integration.golden import EngineSession, adapter_active, load_adapters, make_adapter, pack_folder
from tests.unit.worker.model.tiny import (
    BASE_DIGEST,
    VOCAB,
    first_logits,
    greedy_reference,
    make_model,
    open_runner,
    relative_error,
    save_model,
    whole_logits,
)
from worker.mailbox import AdapterFile, Sampling
from worker.model.config import read_config
from worker.model.runner import ModelRunner

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT uses what transformers deprecates

NUM_TOKENS = 24
ADAPTERS: dict[str, dict[str, Any]] = {
    "all-linear": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "wide": {"r": 40, "lora_alpha": 10, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    "rslora": {"r": 9, "lora_alpha": 6, "use_rslora": True, "target_modules": ["v_proj", "down_proj"]},
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"],
        "rank_pattern": {"v_proj": 7, "layers.1.mlp.up_proj": 1},
        "alpha_pattern": {"v_proj": 3, "layers.0.mlp.down_proj": 20},
    },
    "one-layer": {"r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "gate_proj"], "layers_to_transform": [1]},
}
PROMPT = torch.randint(0, VOCAB, (37,), generator=torch.Generator().manual_seed(8)).tolist()


@dataclass(frozen=True, slots=True)
class Golden:
    model: PeftModel
    open_runner: Callable[[], ModelRunner]
    files: dict[str | None, AdapterFile | None]

    def tokens(self, name: str | None) -> list[int]:
        with adapter_active(self.model, name):
            return greedy_reference(self.model, PROMPT, NUM_TOKENS)


@pytest.fixture(scope="module", params=["llama_tied", "qwen2_bias", "qwen3_qk_norm"])
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Golden]:
    folder = tmp_path_factory.mktemp("golden")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    base = make_model(request.param, eos_token_id=None)
    save_model(base, folder / "base")
    config = read_config(folder / "base")
    shapes = {
        f"layers.{layer}.{name}": (out, inner)
        for layer in range(config.num_layers)
        for name, (inner, out) in config.module_shapes().items()
    }
    linears = BaseLinears(BASE_DIGEST, shapes)
    folders = {
        name: make_adapter(base, folder / name, seed=seed, strength=0.3, **settings)
        for seed, (name, settings) in enumerate(ADAPTERS.items())
    }
    files: dict[str | None, AdapterFile | None] = {None: None}
    for name, adapter in folders.items():
        files[name] = pack_folder(adapter, linears, folder / f"{name}.packed")
    yield Golden(
        load_adapters(base, folders),
        lambda: open_runner(folder / "base", max_running_requests=16, max_resident_adapters=8),
        files,
    )
    torch.set_num_threads(threads)


def test_first_logits_are_pefts(golden: Golden) -> None:
    runner = golden.open_runner()
    for slot, name in enumerate(ADAPTERS):
        file = golden.files[name]
        assert file is not None
        end = runner.total_blocks - 100 * slot
        runner.prepare_adapter(slot, Path(file.path), tuple(range(end - 100, end)))
        with adapter_active(golden.model, name):
            expected = whole_logits(golden.model, PROMPT)[-1]
        with adapter_active(golden.model, None):
            base = whole_logits(golden.model, PROMPT)[-1]
        assert relative_error(base, expected) > 0.05, "the adapter should change something"
        assert relative_error(first_logits(runner, PROMPT, slot), expected) < 1e-4


def test_greedy_tokens_are_pefts_alone_and_mixed(golden: Golden) -> None:
    sampling = Sampling(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    expected = {name: golden.tokens(name) for name in golden.files}
    assert len({tuple(tokens) for tokens in expected.values()}) == len(expected)
    session = EngineSession(golden.open_runner(), max_prefill_tokens=50, max_resident_adapters=8)
    try:
        for name, file in golden.files.items():
            assert session.generate([(PROMPT, file, sampling)]) == [expected[name]], name
        twice = [*golden.files, *reversed(golden.files)]
        mixed = session.generate([(PROMPT, golden.files[name], sampling) for name in twice])
    finally:
        session.close()
    assert mixed == [expected[name] for name in twice]
    assert session.largest_batch == len(twice)
