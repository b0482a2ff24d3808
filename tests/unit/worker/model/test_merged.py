"""A base that is loaded with an adapter folded in computes what the adapter beside the base does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.adapter_format.packed import PackedAdapter, PackedAffine, PackedMatrix, PackedModule, open_packed
from common.merging.changes import plan_changes
from loraplex.errors import AdapterMismatch, BaseMismatch
from tests.unit.worker.model.tiny import (
    BASE_DIGEST,
    VOCAB,
    Job,
    first_logits,
    make_model,
    open_runner,
    random_adapter,
    relative_error,
    run_jobs,
    save_model,
    tiny_runner,
)
from worker.model.config import read_config

PROMPT = torch.randint(0, VOCAB, (21,), generator=torch.Generator().manual_seed(4)).tolist()
RNG = np.random.default_rng(9)


@pytest.mark.parametrize("variant", ["llama_untied", "llama_tied", "qwen2_bias", "qwen3_qk_norm"])
def test_tokens_are_those_of_the_adapter_beside_the_base(variant: str, tmp_path: Path) -> None:
    base = save_model(make_model(variant), tmp_path / "base")
    beside = tiny_runner(base, tmp_path)
    for slot in range(3):
        merged = open_runner(base, merged_artifact=tmp_path / f"{slot}.packed")
        error = relative_error(first_logits(merged, PROMPT), first_logits(beside, PROMPT, slot))
        assert error < 1e-5
        assert run_jobs(merged, [Job(PROMPT, 16)]) == run_jobs(beside, [Job(PROMPT, 16, slot=slot)])
    plain = open_runner(base)
    assert run_jobs(plain, [Job(PROMPT, 16)]) != run_jobs(merged, [Job(PROMPT, 16)])


def module(name: str, inner: int, out: int, affine: PackedAffine | None = None) -> PackedModule:
    a = RNG.normal(0, 0.2, (4, inner)).astype(np.float32)
    b = RNG.normal(0, 0.2, (out, 4)).astype(np.float32)
    return PackedModule(name, 4, 1.0, "F32", a, b, affine=affine)


def affine(out: int, *, shift: float = 0.0) -> PackedAffine:
    return PackedAffine(RNG.uniform(0.5, 1.5, out).astype(np.float32), RNG.normal(0, shift, out).astype(np.float32))


@pytest.mark.parametrize("variant", ["llama_tied", "llama_untied", "llama_biases", "qwen3_bias_tied"])
def test_a_worker_loads_what_a_merged_folder_holds(variant: str, tmp_path: Path, monkeypatch: Any) -> None:
    """DoRA, biases, embedding and head: tensor by tensor as the changes say, and served so."""
    model = make_model(variant)
    base = save_model(model, tmp_path / "base")
    config = read_config(base)
    hidden = config.hidden_size
    q = config.module_shapes()["self_attn.q_proj"]
    modules = (
        module("embed_tokens", VOCAB, hidden),
        module("layers.0.mlp.down_proj", 96, hidden, affine(hidden)),
        module("layers.1.self_attn.q_proj", *q, affine(q[1], shift=0.5)),
    )
    head = PackedMatrix("lm_head", "F32", RNG.normal(0, 0.15, (VOCAB, hidden)).astype(np.float32))
    adapter = PackedAdapter("5" * 64, BASE_DIGEST, "none", modules, (head,))
    monkeypatch.setattr("worker.model.merged.open_packed", lambda _: adapter)
    merged = open_runner(base, merged_artifact=tmp_path / "any")

    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    changes = plan_changes(adapter, model.config.to_dict(), {name: array.shape for name, array in state.items()})
    for name, change in changes.tensors.items():
        before = state[change.source] if change.source else np.zeros(change.shape, np.float32)
        state[name] = change.rows(before, 0)
    settings = {name: changes.config[name] for name in ("tie_word_embeddings", "attention_bias")}
    reference = make_model(variant, **settings)
    reference.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()})
    save_model(reference, tmp_path / "reference")
    expected = open_runner(tmp_path / "reference")
    assert relative_error(first_logits(merged, PROMPT), first_logits(expected, PROMPT)) < 1e-6
    assert relative_error(first_logits(merged, PROMPT), first_logits(open_runner(base), PROMPT)) > 0.05


def test_a_bfloat16_base_is_kept_in_the_workers_dtype(tmp_path: Path) -> None:
    base = save_model(make_model("llama_untied").bfloat16(), tmp_path / "base")
    file = random_adapter(read_config(base), tmp_path / "packed", ranks={"self_attn.q_proj": 4}, seed=1)
    beside = open_runner(base)
    beside.prepare_adapter(0, file, tuple(range(50, 60)))
    exact = open_runner(base, dtype="float32", merged_artifact=file)
    assert relative_error(first_logits(exact, PROMPT), first_logits(beside, PROMPT, 0)) < 1e-5
    rounded = open_runner(base, dtype="bfloat16", merged_artifact=file)
    assert 1e-5 < relative_error(first_logits(rounded, PROMPT), first_logits(beside, PROMPT, 0)) < 0.05


def test_what_does_not_fit_the_base_is_refused(tmp_path: Path) -> None:
    base = save_model(make_model("llama_untied"), tmp_path / "base")
    config = read_config(base)
    other = random_adapter(config, tmp_path / "other", ranks={"mlp.up_proj": 4}, seed=1, base_digest="c" * 64)
    with pytest.raises(BaseMismatch, match="this worker serves bbbbbbbbbbbb"):
        open_runner(base, merged_artifact=other)
    wider = read_config(save_model(make_model("llama_untied", intermediate_size=128), tmp_path / "wider"))
    wrong = random_adapter(wider, tmp_path / "wrong", ranks={"mlp.up_proj": 4}, seed=1)
    assert open_packed(wrong).modules
    with pytest.raises(AdapterMismatch, match=r"layers\.0\.mlp\.up_proj maps 64 to 128"):
        open_runner(base, merged_artifact=wrong)
