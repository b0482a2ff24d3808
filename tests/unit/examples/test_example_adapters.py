"""The adapters in the repository: what their files say, and what they do to the base."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from examples.train_adapters import ADAPTERS, NAMES, RECIPES, task

PROMPTS: list[dict[str, Any]] = json.loads((ADAPTERS.parent / "demo_prompts.json").read_text(encoding="utf-8"))


def config(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ADAPTERS / name / "adapter_config.json").read_text(encoding="utf-8"))
    return found


def test_there_is_a_folder_per_recipe() -> None:
    assert {path.name for path in ADAPTERS.iterdir()} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_has_only_what_peft_needs_and_is_small(name: str) -> None:
    sizes = {path.name: path.stat().st_size for path in (ADAPTERS / name).iterdir()}
    assert sizes.keys() == {"adapter_config.json", "adapter_model.safetensors"}
    assert sizes["adapter_model.safetensors"] <= 2_000_000


@pytest.mark.parametrize("name", NAMES)
def test_the_config_names_the_public_base_and_no_local_path(name: str) -> None:
    assert config(name)["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert not [
        value for value in config(name).values() if isinstance(value, str) and value.startswith(("/", "~", "."))
    ]


@pytest.mark.parametrize("recipe", RECIPES, ids=NAMES)
def test_tensors_are_16_bit_and_of_the_ranks_of_the_recipe(recipe: Any) -> None:
    tensors = load_file(ADAPTERS / recipe.name / "adapter_model.safetensors")
    assert len(tensors) == 30 * len(recipe.targets) * 2
    for name, tensor in tensors.items():
        module, factor = name.split(".")[-3:-1]
        assert tensor.dtype == np.float16
        assert np.isfinite(tensor).all()
        assert tensor.any(), f"{name} is not trained"
        assert tensor.shape[0 if factor == "lora_A" else 1] == recipe.rank_of.get(module, recipe.rank)


def test_ranks_and_targets_differ_between_the_adapters() -> None:
    assert len({config(name)["r"] for name in NAMES}) == len(NAMES)
    assert len({tuple(sorted(config(name)["target_modules"])) for name in NAMES}) == len(NAMES)


def test_demo_prompts_are_for_the_base_and_every_adapter() -> None:
    assert {prompt["model"] for prompt in PROMPTS} == {"base", *NAMES}
    for prompt in PROMPTS:
        assert prompt.keys() == {"model", "prompt", "max_tokens"}
        assert 0 < prompt["max_tokens"] <= 128


@pytest.mark.demo_base
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", NAMES)
def test_the_adapter_does_on_demo_prompts_what_the_base_does_not(demo_base: Path, name: str) -> None:
    peft = pytest.importorskip("peft")
    pytest.importorskip("transformers")
    from examples.check_adapters import greedy
    from examples.training import load_base

    base, tokenizer = load_base(demo_base)
    prompts = [prompt["prompt"] for prompt in PROMPTS if prompt["model"] == name]
    without = greedy(base, tokenizer, prompts[:1], max_tokens=60)
    answers = greedy(peft.PeftModel.from_pretrained(base, str(ADAPTERS / name)), tokenizer, prompts)
    assert task(name).problem(prompts[0], without[0]) is not None
    assert [task(name).problem(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)] == [None, None]
