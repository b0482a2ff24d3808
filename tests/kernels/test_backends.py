"""The backends against the float32 oracle: rank x popularity x format, lengths x heads, and rows left alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.arena import NUM_CHUNKS, NUM_LAYERS, add_adapter, batch_of, make_arena, randn
from worker.kernels.cpu.backend import CpuBackend
from worker.kernels.cpu.pool import shared_pool
from worker.kernels.eager import EagerBackend
from worker.kernels.interface import Backend, StepKernels
from worker.kernels.layout import Arena, AttentionShape, Site
from worker.kernels.linear import Linear
from worker.kernels.reference import ReferenceBackend
from worker.kernels.tiles import Field, Format, PlacedAdapter
from worker.model.base_quantization import quantize_linear

SMALL = AttentionShape(NUM_LAYERS, 4, 2, 16)
WIDE = AttentionShape(NUM_LAYERS, 4, 2, 64)
COS32, SIN32 = (randn(300, 32, seed=2) * 100).cos(), (randn(300, 32, seed=2) * 100).sin()
COS, SIN = (randn(300, 12, seed=2) * 100).cos(), (randn(300, 12, seed=2) * 100).sin()


def cpu(num_threads: int) -> Backend:
    return CpuBackend(shared_pool(num_threads))


BACKENDS: dict[str, Callable[[], Backend]] = {
    "one thread": lambda: cpu(1),
    "three threads": lambda: cpu(3),
    "eager": EagerBackend,
}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return BACKENDS[str(request.param)]()


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    error = float((actual.float() - expected.float()).norm() / expected.float().norm())
    assert error < 1e-5


def both(backend: Backend, compute: Callable[[Backend, StepKernels], Tensor], rows: int) -> tuple[Tensor, Tensor]:
    """Compute over `rows` rows of the base by the backend and by the oracle."""
    results = []
    for one in (backend, ReferenceBackend()):
        arena = make_arena(SMALL)
        step = one.bind(arena, COS, SIN).step(batch_of([(0, rows)], {}, [-1]))
        result = compute(one, step)
        step.finish()
        results.append(result)
    return results[0], results[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("out", "inner"), [(48, 32), (97, 65), (13, 40), (5, 24), (200, 576)])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 33])
def test_linear(backend: Backend, rows: int, out: int, inner: int, biased: bool, dtype: torch.dtype) -> None:
    weight, bias, x = randn(out, inner, dtype=dtype), randn(out, seed=1) if biased else None, randn(rows, inner, seed=2)
    assert_close(*both(backend, lambda one, step: step.linear(one.pack(Linear.plain(weight, bias)), x), rows))


@pytest.mark.parametrize(("out", "inner"), [(48, 32), (97, 65), (5, 24)])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7])
def test_linear_in_whole_numbers(rows: int, out: int, inner: int) -> None:
    linear = quantize_linear(Linear.plain(randn(out, inner, dtype=torch.bfloat16), randn(out, seed=1)))
    assert linear.weight.dtype == torch.int8
    x = randn(rows, inner, seed=2)
    assert_close(*both(cpu(2), lambda one, step: step.linear(one.pack(linear), x), rows))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_embed(kind: str) -> None:
    plain = Linear.plain(randn(50, 24).to(torch.float32 if kind == "float32" else torch.bfloat16), None)
    embedding = quantize_linear(plain) if kind == "int8" else plain
    tokens = torch.tensor([0, 49, 16, 15, 31, 16])
    exact, expected = both(cpu(2), lambda one, step: step.embed(one.pack(embedding), tokens).float(), 6)
    assert torch.equal(exact, expected)


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (9, 64), (200, 64), (9, 2100), (3, 5000)])
def test_rms_norm(backend: Backend, rows: int, width: int) -> None:
    x, weight = randn(rows, width) * 3, randn(width, seed=1)
    assert_close(*both(backend, lambda _, step: step.rms_norm(x, weight, 1e-5), rows))


@pytest.mark.parametrize("rows", [5, 200])
def test_add_rms_norm_and_add(backend: Backend, rows: int) -> None:
    weight, delta = randn(64, seed=1), randn(rows, 64, seed=2)

    def compute(_: Backend, step: StepKernels) -> Tensor:
        residual = randn(rows, 64)
        normed = step.add_rms_norm(residual, delta, weight, 1e-5)
        step.add(residual, normed)
        return residual

    assert_close(*both(backend, compute, rows))


@pytest.mark.parametrize("rows", [7, 290])
def test_silu_mul(backend: Backend, rows: int) -> None:
    def gate_up() -> Tensor:
        return torch.cat([randn(rows - 1, 48) * 4, torch.tensor([[-100.0, 100.0, 0.0] * 16])])

    assert_close(*both(backend, lambda _, step: step.silu_mul(gate_up()), rows))


def test_largest(backend: Backend) -> None:
    def compute(_: Backend, step: StepKernels) -> Tensor:
        logits = randn(9, 301)
        logits[1, 7], logits[2] = torch.inf, -torch.inf
        logits[3] = -logits[3].abs() - 1
        logits[4], logits[4, ::2] = 0.0, -0.0
        logits[5, 300] = 100
        logits[6, 200] = logits[6, 20] = 100
        logits[7, 11] = torch.nan
        logits[8, 11] = -torch.nan
        values, places = step.largest(logits)
        rooms.append((values, places))
        return values

    rooms: list[tuple[Tensor, Tensor]] = []
    both(backend, compute, 9)
    (values, places), (expected, expected_places) = rooms
    assert torch.equal(values[:7], expected[:7])
    assert torch.equal(places[:7], expected_places[:7])
    assert values[7:].isnan().all()
    assert expected[7:].isnan().all()


LENGTHS = {
    "one": [(0, 1)],
    "a prompt": [(0, 5)],
    "at the bounds of blocks": [(15, 1), (16, 1), (17, 1), (0, 1)],
    "long and short": [(3, 1), (100, 1), (250, 1), (31, 1)],
    "prompts, chunks and decodes": [(0, 33), (7, 20), (16, 16), (40, 1), (5, 1)],
    "around the end of a piece": [(285, 4), (254, 3)],
}


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "qk norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (3, 3, 8), (9, 3, 64), (8, 1, 24)])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_attention(
    backend: Backend, lengths: str, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, normed: bool
) -> None:
    shape = AttentionShape(NUM_LAYERS, heads, kv_heads, dim)
    angles = randn(300, dim // 2, seed=2) * 100
    weight = randn(heads + kv_heads, dim, seed=9) if normed else None
    chosen = LENGTHS[lengths]
    fused = randn(sum(count for _, count in chosen), (heads + 2 * kv_heads) * dim, seed=5)
    outputs, caches = [], []
    for one in (backend, ReferenceBackend()):
        arena = make_arena(shape, dtype)
        batch = batch_of(chosen, {}, [-1] * len(chosen))
        for request in batch.requests:  # what was computed before; the rest of its blocks is still NaN
            for position in range(request.position):
                past = randn(2, kv_heads, dim, seed=1000 * request.start + position)
                arena.kv[request.block_ids[position // 16], 1, :, :, position % 16] = past
        before = arena.kv[:, 0].clone()
        step = one.bind(arena, angles.cos(), angles.sin()).step(batch)
        outputs.append(step.attention(fused.clone(), 1, weight, 1e-5))
        step.finish()
        caches.append(arena.kv)
        assert torch.equal(arena.kv[:, 0].view(torch.uint8), before.view(torch.uint8))  # the other layer
    assert outputs[0].shape == (len(fused), heads * dim)
    assert_close(*outputs)
    written = ~caches[1].isnan()
    assert torch.equal(written, ~caches[0].isnan())
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2  # one rounding of a bfloat16 may fall the other way
    assert torch.allclose(caches[0][written].float(), caches[1][written].float(), rtol=tolerance, atol=1e-5)


def test_attention_of_a_broken_row_stays_its_own(backend: Backend) -> None:
    lengths = [(0, 1), (20, 1), (0, 6)]
    fused = randn(8, 8 * 16, seed=5)
    results = []
    for broken in (False, True):
        arena = make_arena(SMALL)
        batch = batch_of(lengths, {}, [-1] * 3)
        for position in range(20):
            arena.kv[batch.requests[1].block_ids[position // 16], 1, :, :, position % 16] = randn(
                2, 2, 16, seed=position
            )
        poisoned = fused.clone()
        if broken:
            poisoned[0] = torch.nan
            poisoned[0, 0] = torch.inf
        step = backend.bind(arena, COS[:, :8], SIN[:, :8]).step(batch)
        results.append(step.attention(poisoned, 1, None, 1e-5))
        step.finish()
    assert torch.equal(results[0][1:], results[1][1:])
    assert not results[0].isnan().any()


POPULARITY: dict[str, Callable[[int], list[int]]] = {
    "identical": lambda n: [0] * n,
    "distinct": lambda n: list(range(n)),
    "uniform": lambda n: [i * i // n for i in range(n)],
    "skewed": lambda n: [0] * (n - 3) + [1, 2, 3],
    "with base": lambda n: [-1] * (n // 2) + [i // 2 for i in range(n - n // 2)],
    "all base": lambda n: [-1] * n,
}
FORMATS = [*Format, None]
"""None: each module in another one."""


def adapters_in(
    arena: Arena, slots: list[int], ranks: tuple[int, ...], kind: Format | None
) -> dict[int, PlacedAdapter]:
    adapters: dict[int, PlacedAdapter] = {}
    free = list(range(NUM_CHUNKS, arena.num_chunks))
    for slot in sorted({slot for slot in slots if slot >= 0}):
        of_slot = ranks if slot % 2 == 0 else tuple(reversed([max(r - 1, 0) or 2 for r in ranks]))
        modules = []
        for index, (rank, (out, outer)) in enumerate(zip(of_slot, [(0, 176), (176, 64), (240, 16)], strict=True)):
            if rank:
                modules.append((rank, out, outer, list(Format)[(index + slot) % len(Format)] if kind is None else kind))
        adapters[slot] = add_adapter(arena, free, modules, inner=80, seed=1000 * slot)
        free = free[adapters[slot].chunks_used :]
    return adapters


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: "mixed" if kind is None else kind.name)
@pytest.mark.parametrize("popularity", POPULARITY)
@pytest.mark.parametrize("ranks", [(1, 1, 1), (8, 8, 8), (16, 0, 4), (0, 3, 64), (128, 0, 0)], ids=str)
def test_lora_add(backend: Backend, ranks: tuple[int, ...], popularity: str, kind: Format | None) -> None:
    rows = 12
    slots = POPULARITY[popularity](rows)
    x, y = randn(rows, 80, seed=7), randn(rows, 256, seed=8)
    results = []
    for one in (backend, ReferenceBackend()):
        arena = make_arena(WIDE, num_chunks=200)
        batch = batch_of([(0, 1)] * rows, adapters_in(arena, slots, ranks, kind), slots)
        kernels = one.bind(arena, COS, SIN)
        step = kernels.step(batch)
        result = y.clone()
        step.lora_add(result, x, 1, Site.QKV)
        for layer, site in ((0, Site.QKV), (1, Site.DOWN)):  # the adapter does not attach there
            step.lora_add(result, x, layer, site)
        step.finish()
        results.append(result)
    assert_close(*results)
    base = sum(slot < 0 for slot in slots)  # they come first
    assert torch.equal(results[0][:base], y[:base])
    assert popularity == "all base" or not torch.equal(results[0], y)


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: "mixed" if kind is None else kind.name)
def test_a_row_with_an_adapter_is_the_same_bit_for_bit_whoever_shares_it(kind: Format | None) -> None:
    """One row alone, then 2 to 33 rows of one adapter, and rows of several."""
    x = randn(33, 80, seed=7)
    arena = make_arena(WIDE, num_chunks=200)
    adapters = adapters_in(arena, [0, 1, 2], (16, 5, 40), kind)

    def compute(slots: list[int], rows: Tensor) -> Tensor:
        step = cpu(2).bind(arena, COS, SIN).step(batch_of([(0, 1)] * len(slots), adapters, slots))
        y = torch.ones(len(slots), 256)
        step.lora_add(y, rows.clone(), 1, Site.QKV)
        step.finish()
        return y

    alone = {slot: torch.cat([compute([slot], row[None]) for row in x]) for slot in adapters}
    for count in range(2, 34):
        assert torch.equal(compute([0] * count, x[:count]), alone[0][:count])
    for count in (3, 8, 20, 33):
        slots = sorted(i * i % 4 - 1 for i in range(count))  # some on the base
        expected = torch.stack([torch.ones(256) if s < 0 else alone[s][row] for row, s in enumerate(slots)])
        assert torch.equal(compute(slots, x[:count]), expected)


@pytest.mark.parametrize("kind", [Format.FLOAT32, Format.BFLOAT16, Format.FLOAT16], ids=lambda kind: kind.name)
def test_what_is_broken_in_an_adapter_arrives(backend: Backend, kind: Format) -> None:
    arena = make_arena(WIDE, num_chunks=200)
    adapters = adapters_in(arena, [0], (16, 0, 0), kind)
    record = adapters[0].records[0]
    nan, size = {Format.FLOAT32: (0x7FC00000, 4), Format.BFLOAT16: (0x7FC0, 2), Format.FLOAT16: (0x7E00, 2)}[kind]
    at = int(record[Field.B]) + 5 * size
    arena.memory[at : at + size] = torch.from_numpy(np.frombuffer(nan.to_bytes(size, "little"), np.uint8).copy())
    step = backend.bind(arena, COS, SIN).step(batch_of([(0, 1)] * 2, adapters, [0, 0]))
    y = torch.zeros(2, 256)
    step.lora_add(y, randn(2, 80), 1, Site.QKV)
    step.finish()
    assert y.isnan().nonzero().tolist() == [[0, 5], [1, 5]]


@pytest.mark.parametrize("rows", range(1, 12))
def test_a_row_is_the_same_bit_for_bit_however_many_it_is_computed_with(rows: int) -> None:
    """Linears in all their forms, LoRA and attention: a neighbour must not move a result by a rounding."""
    weight, x = randn(100, 80, dtype=torch.bfloat16), randn(12, 80, seed=1)
    slots = [i % 3 for i in range(12)]
    results = []
    for count in (12, rows):
        arena = make_arena(WIDE, num_chunks=200)
        adapters = adapters_in(arena, slots, (16, 0, 4), None)
        chosen = sorted(slots)[:count]
        step = cpu(2).bind(arena, COS32, SIN32).step(batch_of([(0, 1)] * count, adapters, chosen))
        y = step.linear(cpu(2).pack(Linear.plain(weight, None)), x[:count].clone())
        wide = torch.zeros(count, 256)
        step.lora_add(wide, x[:count].clone(), 1, Site.QKV)
        attended = step.attention(randn(12, 8 * 64, seed=3)[:count].clone(), 0, None, 1e-5)
        step.finish()
        results.append(torch.cat([y, wide, attended], dim=1))
    assert torch.equal(results[0][:rows], results[1])


CHUNKINGS = {
    "few": [7, 16, 1, 24, 252],
    "by threes": [3] * 100,
    "at the bounds of blocks": [16] * 18 + [12],
    "past a piece": [255, 1, 1, 43],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (7, 1)])
@pytest.mark.parametrize("chunking", CHUNKINGS)
def test_a_prompt_is_the_same_bit_for_bit_in_chunks_and_whole(
    chunking: str, heads: int, kv_heads: int, dtype: torch.dtype
) -> None:
    length, dim = 300, 16
    fused = randn(length, (heads + 2 * kv_heads) * dim, seed=3)
    assert sum(CHUNKINGS[chunking]) == length
    results = []
    for counts in ([length], CHUNKINGS[chunking]):
        arena = make_arena(AttentionShape(NUM_LAYERS, heads, kv_heads, dim), dtype)
        kernels = cpu(2).bind(arena, COS[:, :8], SIN[:, :8])
        parts = []
        position = 0
        (whole,) = batch_of([(0, length)], {}, [-1]).requests
        for count in counts:
            request = batch_of([(position, count)], {}, [-1])
            (rows,) = request.requests
            blocks = np.array(whole.block_ids)[: (position + count + 15) // 16]
            at = np.arange(position, position + count)
            moved = type(rows)(rows.start, rows.count, rows.position, tuple(blocks.tolist()), None)
            batch = type(request)(request.token_ids, request.positions, blocks[at // 16] * 16 + at % 16, (moved,))
            step = kernels.step(batch)
            part = step.attention(fused[position : position + count].clone(), 0, None, 1e-5)
            step.finish()
            parts.append(part.clone())  # the next step has its room
            position += count
        results.append(torch.cat(parts))
    assert torch.equal(*results)
