"""Every architecture against transformers: logits, tokens, chunks, and both spellings of config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.unit.worker.model.tiny import (
    VARIANTS,
    VOCAB,
    Job,
    first_logits,
    greedy_reference,
    make_model,
    open_runner,
    relative_error,
    run_jobs,
    save_model,
    whole_logits,
)

PROMPT = torch.randint(0, VOCAB, (70,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_tokens_equal_transformers(variant: str, tmp_path: Path) -> None:
    model = make_model(variant)
    runner = open_runner(save_model(model, tmp_path))
    assert relative_error(first_logits(runner, PROMPT), whole_logits(model, PROMPT)[-1]) < 1e-5
    expected = greedy_reference(model, PROMPT, 20)
    assert len(set(expected)) > 2  # a model that repeats itself would hide wrong positions
    short = PROMPT[:5]
    jobs = [
        Job(PROMPT, 20),
        Job(PROMPT, 20, chunk=(7, 1, 29, 2)),
        Job(PROMPT, 20, chunk=(1,), start_step=2),
        Job(short, 20, start_step=5),
    ]
    assert run_jobs(runner, jobs) == [expected, expected, expected, greedy_reference(model, short, 20)]


@pytest.mark.parametrize("variant", ["llama_rope_llama3", "llama_rope_linear", "qwen3_qk_norm", "mistral_window"])
def test_the_older_spelling_of_config_means_the_same(variant: str, tmp_path: Path) -> None:
    model = make_model(variant)
    save_model(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    config["rope_scaling"] = None if parameters["rope_type"] == "default" else parameters
    if config["rope_scaling"]:
        config["rope_scaling"]["type"] = config["rope_scaling"].pop("rope_type")
    config["torch_dtype"] = config.pop("dtype", "float32")
    (tmp_path / "config.json").write_text(json.dumps(config))
    error = relative_error(first_logits(open_runner(tmp_path), PROMPT), whole_logits(model, PROMPT)[-1])
    assert error < 1e-5


def test_bfloat16_agrees_roughly_with_float32(tmp_path: Path) -> None:
    model = make_model("llama_tied")
    runner = open_runner(save_model(model, tmp_path), dtype="bfloat16")
    assert runner.dtype == "bfloat16"
    assert relative_error(first_logits(runner, PROMPT), whole_logits(model, PROMPT)[-1]) < 0.05


def test_a_bfloat16_checkpoint_runs_in_float32_as_transformers_does(tmp_path: Path) -> None:
    runner = open_runner(save_model(make_model("qwen2_bias").bfloat16(), tmp_path))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert relative_error(first_logits(runner, PROMPT), whole_logits(model, PROMPT)[-1]) < 1e-5


def test_shards_are_read_like_one_file(tmp_path: Path) -> None:
    model = make_model("llama_untied")
    save_model(model, tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    error = relative_error(first_logits(open_runner(tmp_path), PROMPT), whole_logits(model, PROMPT)[-1])
    assert error < 1e-5
