"""Adapters with an embedding or a head of their own, alone and mixed, against the formulas in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.adapter_format.packed import (
    EMBEDDING,
    HEAD,
    PackedAdapter,
    PackedAffine,
    PackedMatrix,
    PackedModule,
    PackedPart,
    matrix_tensors,
    module_tensors,
    pack,
    quantized_module,
)
from common.adapter_format.parts import dequantize
from loraplex.errors import CorruptArtifact, DeviceFull, ResourceExhausted, TooLarge
from tests.unit.worker.model.tiny import (
    BASE_DIGEST,
    VOCAB,
    Job,
    chunks_for,
    first_logits,
    make_model,
    open_runner,
    relative_error,
    run_jobs,
    save_model,
)
from worker.adapters.outside import NOTHING, outside_of
from worker.engine.plan import ComparisonStep, SequenceStep
from worker.engine_process import describe
from worker.kernels.eager import EagerBackend
from worker.kernels.interface import Backend
from worker.kernels.reference import ReferenceBackend
from worker.model.runner import ModelRunner

HIDDEN = 64
PROMPT = torch.randint(0, VOCAB, (21,), generator=torch.Generator().manual_seed(8)).tolist()


def normal(*shape: int, seed: int, scale: float = 0.3) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32)


def embedding_lora(rank: int, seed: int, affine: PackedAffine | None = None) -> PackedModule:
    """A as a view of rows by token, as a packed file has it."""
    a, b = normal(VOCAB, rank, seed=seed).T, normal(HIDDEN, rank, seed=seed + 1)
    return PackedModule(EMBEDDING, rank, 1.5, "F32", a, b, (), affine)


def head_lora(rank: int, seed: int, affine: PackedAffine | None = None) -> PackedModule:
    a, b = normal(rank, HIDDEN, seed=seed), normal(VOCAB, rank, seed=seed + 1)
    return PackedModule(HEAD, rank, 0.7, "F32", a, b, (), affine)


def int8_module(name: str, rank: int, seed: int) -> PackedModule:
    rng = np.random.default_rng(seed)
    inner, out = (VOCAB, HIDDEN) if name == EMBEDDING else (HIDDEN, VOCAB)
    a, b = rng.integers(-127, 128, (inner, rank), np.int8).T, rng.integers(-127, 128, (rank, out), np.int8)
    scale = rng.uniform(1e-5, 3e-5, rank).astype(np.float32)
    return quantized_module(name, (PackedPart("int8", rank, scale, "I8", a, b),))


def affine(count: int, seed: int) -> PackedAffine:
    return PackedAffine(1 + normal(count, seed=seed), normal(count, seed=seed + 1))


def matrix(name: str, seed: int, dtype: str = "F32") -> PackedMatrix:
    weight = normal(VOCAB, HIDDEN, seed=seed, scale=0.15)
    if dtype == "BF16":
        return PackedMatrix(name, dtype, (weight.view(np.uint32) >> 16).astype(np.uint16))
    return PackedMatrix(name, dtype, weight.astype(np.float16) if dtype == "F16" else weight)


def on_q_proj(seed: int) -> PackedModule:
    a, b = normal(3, HIDDEN, seed=seed, scale=0.1), normal(HIDDEN, 3, seed=seed + 1)
    return PackedModule("layers.1.self_attn.q_proj", 3, 1.0, "F32", a, b)


def packed(*modules: PackedModule, matrices: tuple[PackedMatrix, ...] = ()) -> PackedAdapter:
    return PackedAdapter("0" * 64, BASE_DIGEST, "none", tuple(sorted(modules, key=lambda m: m.name)), matrices)


ADAPTERS = {
    "embedding": packed(embedding_lora(4, 1)),
    "embedding and a linear": packed(embedding_lora(4, 1), on_q_proj(80)),
    "embedding, scaled": packed(embedding_lora(2, 20, affine(HIDDEN, 22)), on_q_proj(30)),
    "head": packed(head_lora(5, 3)),
    "head, scaled": packed(head_lora(1, 5, affine(VOCAB, 7)), on_q_proj(31)),
    "both in int8": packed(int8_module(EMBEDDING, 16, 9), int8_module(HEAD, 3, 10)),
    "own embedding": packed(on_q_proj(32), matrices=(matrix(EMBEDDING, 11, "F16"),)),
    "own head": packed(on_q_proj(33), matrices=(matrix(HEAD, 12, "BF16"),)),
    "own head in float16": packed(matrices=(matrix(HEAD, 13, "F16"),)),
    "own of both": packed(matrices=(matrix(EMBEDDING, 14), matrix(HEAD, 15))),
    "own head, embedding": packed(embedding_lora(7, 16), matrices=(matrix(HEAD, 17),)),
    "a linear": packed(on_q_proj(34)),
}


def floats(matrix: PackedMatrix) -> Tensor:
    weight = torch.from_numpy(matrix.weight.copy())
    return (weight.view(torch.bfloat16) if matrix.dtype == "BF16" else weight).float()


def delta(module: PackedModule) -> Tensor:
    """What a module adds to its weight, [out, in]."""
    return torch.from_numpy(sum(b @ a for a, b in map(dequantize, module.parts)))


def affected(y: Tensor, module: PackedModule) -> Tensor:
    if module.affine is None:
        return y
    return torch.from_numpy(module.affine.scale) * y + torch.from_numpy(module.affine.shift)


def expected_logits(model: Any, adapter: PackedAdapter, tokens: list[int]) -> Tensor:
    """Logits of the last token: formulas, with the transformers model for what lies between."""
    modules = {module.name: module for module in adapter.modules}
    matrices = {matrix.name: floats(matrix) for matrix in adapter.matrices}
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    q_proj = model.model.layers[1].self_attn.q_proj
    with torch.inference_mode():
        x = matrices.get(EMBEDDING, embedding)[tokens]
        if (own := modules.get(EMBEDDING)) is not None:
            x = affected(x + delta(own).T[tokens], own)
        before = q_proj.weight.clone()
        if (linear := modules.get("layers.1.self_attn.q_proj")) is not None:
            q_proj.weight.add_(delta(linear))
        hidden = model.model(inputs_embeds=x[None], use_cache=False).last_hidden_state[0, -1]
        q_proj.weight.copy_(before)
        logits = matrices.get(HEAD, head) @ hidden
        if (own := modules.get(HEAD)) is not None:
            logits = affected(logits + delta(own) @ hidden, own)
    assert isinstance(logits, Tensor)
    return logits


@pytest.fixture(scope="module", params=["llama_tied", "llama_untied"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = make_model(request.param)
    return model, save_model(model, tmp_path_factory.mktemp("base"))


@dataclass(frozen=True, slots=True)
class Opener:
    """Opens runners, and has them load adapters that were made here."""

    folder: Path

    def open(self, folder: Path, *names: str, **changes: Any) -> ModelRunner:
        runner = open_runner(folder, max_resident_adapters=16, max_running_requests=32, **changes)
        for slot, name in enumerate(names):
            self.load(runner, slot, ADAPTERS[name])
        return runner

    def load(self, runner: ModelRunner, slot: int, adapter: PackedAdapter) -> None:
        runner.prepare_adapter(slot, self.file(adapter), chunks_for(runner, slot))

    def file(self, adapter: PackedAdapter) -> Path:
        """Write an adapter; one in int8 is one of that format."""
        file = self.folder / "packed"
        quantized = any(module.quantized for module in adapter.modules)
        pack(replace(adapter, format="int8" if quantized else "none"), file)
        return file


@pytest.fixture
def opener(tmp_path: Path) -> Opener:
    return Opener(tmp_path)


BACKENDS: dict[str, Callable[[], Backend | None]] = {
    "cpu": lambda: None,
    "eager": EagerBackend,
    "reference": ReferenceBackend,
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_follow_the_formulas(backend: str, base: tuple[Any, Path], opener: Opener) -> None:
    model, folder = base
    runner = opener.open(folder, *ADAPTERS, backend=BACKENDS[backend]())
    plain = first_logits(runner, PROMPT)
    for slot, (name, adapter) in enumerate(ADAPTERS.items()):
        expected = expected_logits(model, adapter, PROMPT)
        assert relative_error(plain, expected) > 0.02, name
        assert relative_error(first_logits(runner, PROMPT, slot), expected) < 1e-4, name
    assert torch.equal(first_logits(runner, PROMPT), plain)


def test_answers_are_the_same_alone_and_mixed(base: tuple[Any, Path], opener: Opener) -> None:
    """Prompts in chunks beside decodes, in another order; ordinary steps between them are replayed as ever."""
    runner = opener.open(base[1], *ADAPTERS)

    def job(slot: int) -> Job:
        return Job(PROMPT[: 5 + slot % 4], 6, slot=slot, chunk=(3, 16), start_step=slot % 3)

    slots = [*range(-1, len(ADAPTERS))]
    alone = {slot: run_jobs(runner, [job(slot)])[0] for slot in slots}
    assert len({tuple(tokens) for tokens in alone.values()}) > len(slots) // 2
    mixed = [*slots, *reversed(slots)]
    assert run_jobs(runner, [job(slot) for slot in mixed]) == [alone[slot] for slot in mixed]
    assert [run_jobs(runner, [job(slot)])[0] for slot in slots] == [alone[slot] for slot in slots]


def test_a_row_is_the_same_bit_for_bit_whatever_shares_its_step(base: tuple[Any, Path], opener: Opener) -> None:
    runner = opener.open(base[1], *ADAPTERS)

    def logits(slots: list[int]) -> dict[int, Tensor]:
        sequences = [
            SequenceStep(n, tuple(PROMPT[: 1 + n % 2]), 0, (n,), slot, sample=True) for n, slot in enumerate(slots)
        ]
        with torch.inference_mode():
            sampled, scores = runner._forward(sequences)
        assert scores is not None
        return {s.request_id: row.clone() for s, row in zip(sampled, scores.logits, strict=True)}

    slots = [slot for slot in range(-1, len(ADAPTERS)) for _ in range(2)]
    together = logits(slots)
    for number, slot in enumerate(slots):
        pair = logits([-1] * (number % 2) + [slot])  # as long a prompt as in the batch
        assert torch.equal(pair[number % 2], together[number])


def test_a_comparison_sees_both_artifacts_parts(base: tuple[Any, Path], opener: Opener) -> None:
    runner = opener.open(base[1], "own of both", "both in int8")
    tokens = tuple(PROMPT)

    def compare(measured: int) -> tuple[tuple[bool, ...], tuple[float, ...]]:
        comparison = ComparisonStep(7, tokens, 15, 0, (0, 1), measured, (2, 3))
        other = SequenceStep(1, (5,), 0, (9,), 1, sample=True)
        with torch.inference_mode():
            _, scores, compared = runner._forward_comparing([other], comparison, None)
        assert scores is not None
        alone = first_logits(runner, [5], 1)
        assert torch.equal(scores.logits[0], alone)
        return compared.same_top, compared.kl

    same, kl = compare(0)
    assert all(same)
    assert max(kl) < 1e-6
    _, kl = compare(1)
    assert min(kl) > 1e-3


def test_ordinary_steps_are_replayed_while_such_an_adapter_is_on_the_device(
    base: tuple[Any, Path], opener: Opener
) -> None:
    runner = opener.open(base[1], "own of both", "a linear")
    decodes = [SequenceStep(n, (5,), 0, (n,), 1, sample=True) for n in range(2)]
    changed = [SequenceStep(n, (5,), 0, (n,), 0, sample=True) for n in range(2)]
    for sequences in (decodes, changed, decodes, changed):
        with torch.inference_mode():
            runner._forward(sequences)
    tapes = runner._decoder._kernels.tapes  # type: ignore[attr-defined]
    assert tapes.find((2, True, True)).remembered is not None


def test_parts_count_against_their_own_budget(base: tuple[Any, Path], opener: Opener) -> None:
    whole = 4 * VOCAB * HIDDEN
    runner = opener.open(base[1], max_vocabulary_bytes=3 * whole)
    memory = runner._adapters._vocabulary
    assert memory is not None
    opener.load(runner, 0, ADAPTERS["own of both"])
    assert memory.used_bytes == 2 * whole
    assert runner._adapters.get(0).chunks_used == 0
    with pytest.raises(DeviceFull, match="max_vocabulary_bytes") as refused:
        opener.load(runner, 1, ADAPTERS["own of both"])
    assert describe(refused.value).retry_after_s == 1.0
    assert memory.used_bytes == 2 * whole
    opener.load(runner, 1, ADAPTERS["own head"])
    assert memory.used_bytes == 2.5 * whole
    runner.release_adapter(0)
    runner.release_adapter(1)
    assert memory.used_bytes == 0
    small = opener.open(base[1], max_vocabulary_bytes=whole)
    with pytest.raises(TooLarge, match="max_vocabulary_bytes"):
        opener.load(small, 0, ADAPTERS["own of both"])


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_files_header_tells_what_its_parts_take(name: str, base: tuple[Any, Path], opener: Opener) -> None:
    runner = opener.open(base[1])
    file = opener.file(ADAPTERS[name])
    outside = outside_of(file)
    load = runner.prepare_adapter(0, file, chunks_for(runner, 0))
    memory = runner._adapters._vocabulary
    assert memory is not None
    assert memory.used_bytes == outside.device_bytes
    assert load.device_bytes == outside.device_bytes + runner._adapters.get(0).device_bytes
    adapter = ADAPTERS[name]
    tensors = [t for module in adapter.modules if module.name in (EMBEDDING, HEAD) for t in module_tensors(module)]
    assert outside.file_bytes == sum(array.nbytes for _, _, array in [*tensors, *matrix_tensors(adapter.matrices)])


def test_a_file_that_is_none_has_nothing_outside_the_arena(tmp_path: Path) -> None:
    for content in (b"", b"x" * 7, (2**40).to_bytes(8, "little"), b'\x10\0\0\0\0\0\0\0{"lm_head.A": {}}'):
        (tmp_path / "file").write_bytes(content)
        assert outside_of(tmp_path / "file") == NOTHING
    assert outside_of(tmp_path / "absent") == NOTHING


def test_a_load_that_fails_gives_its_bytes_back(base: tuple[Any, Path], opener: Opener) -> None:
    runner = opener.open(base[1])
    file = opener.file(ADAPTERS["own head"])
    with pytest.raises(ResourceExhausted, match="chunks"):
        runner.prepare_adapter(0, file, ())
    memory = runner._adapters._vocabulary
    assert memory is not None
    assert memory.used_bytes == 0


@pytest.mark.parametrize(
    "adapter",
    [
        packed(PackedModule(HEAD, 2, 1.0, "F32", normal(2, HIDDEN, seed=1), normal(VOCAB - 1, 2, seed=2))),
        packed(PackedModule(EMBEDDING, 2, 1.0, "F32", normal(2, HIDDEN, seed=1), normal(VOCAB, 2, seed=2))),
        packed(matrices=(PackedMatrix(HEAD, "F32", normal(HIDDEN, VOCAB, seed=1)),)),
        packed(matrices=(PackedMatrix("layers.0.mlp.up_proj", "F32", normal(VOCAB, HIDDEN, seed=1)),)),
    ],
)
def test_what_does_not_fit_the_base_is_named(adapter: PackedAdapter, base: tuple[Any, Path], opener: Opener) -> None:
    runner = opener.open(base[1])
    with pytest.raises(CorruptArtifact) as refused:
        opener.load(runner, 0, adapter)
    assert refused.value.metadata["tensor"] == (adapter.modules or adapter.matrices)[0].name
