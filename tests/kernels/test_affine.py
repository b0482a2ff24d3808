"""Affines behind LoRA: y <- scale · y + shift on a module's columns, for rows of its adapter alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.arena import NUM_CHUNKS, NUM_LAYERS, batch_of, make_arena, randn, random_factor, random_scales
from worker.kernels.cpu.backend import CpuBackend
from worker.kernels.cpu.pool import shared_pool
from worker.kernels.eager import EagerBackend
from worker.kernels.interface import Backend
from worker.kernels.layout import Arena, AttentionShape, Site
from worker.kernels.linear import Linear
from worker.kernels.reference import ReferenceBackend
from worker.kernels.tiles import INT4_GROUP, AffineTile, Format, PlacedAdapter, Tile, place_tiles
from worker.model.base_quantization import quantize_linear

SHAPE = AttentionShape(NUM_LAYERS, 4, 2, 64)
COS, SIN = randn(300, 32, seed=2).cos(), randn(300, 32, seed=2).sin()
INNER, MODULES = 80, ((0, 176), (176, 64), (240, 16))
"""First output and outputs of the site's modules."""
BACKENDS: dict[str, Callable[[], Backend]] = {
    "one thread": lambda: CpuBackend(shared_pool(1)),
    "two threads": lambda: CpuBackend(shared_pool(2)),
    "eager": EagerBackend,
}
FORMATS = [Format.FLOAT32, Format.FLOAT16, Format.INT8, Format.INT4]


def affine_of(count: int, seed: int) -> tuple[Tensor, Tensor]:
    return 1 + randn(count, seed=seed) / 4, randn(count, seed=seed + 1)


def place(
    arena: Arena, chunk_ids: Sequence[int], *, rank: int, kind: Format, affines: Sequence[int], seed: int
) -> PlacedAdapter:
    """An adapter of layer 1's QKV site, all modules of one rank and format; `affines` are the modules with one."""
    tiles: list[Tile | AffineTile] = []
    for number, (out, outer) in enumerate(MODULES):
        at = seed + 100 * number
        for first in range(0, rank, 16):
            ranks = min(16, rank - first)
            a, b = random_factor(ranks, INNER, kind, at + first), random_factor(ranks, outer, kind, at + first + 1)
            scale = random_scales(ranks, INNER, kind, at)
            b_scale = random_scales(ranks, outer, kind, at) if kind == Format.INT4 else None
            tiles.append(Tile(len(Site) + Site.QKV, kind, out, INNER, outer, a, b, scale, b_scale))
        if number in affines:
            scale, shift = (values.numpy() for values in affine_of(outer, at))
            half = outer // 2  # as one that is cut
            for columns in (slice(0, half), slice(half, outer)):
                tiles.append(
                    AffineTile(len(Site) + Site.QKV, out + (columns.start or 0), scale[columns], shift[columns])
                )
    placed, copies = place_tiles(
        tiles,
        version_digest=f"{seed}",
        num_places=NUM_LAYERS * len(Site),
        chunk_bytes=arena.chunk_bytes,
        chunk_ids=chunk_ids,
    )
    memory = arena.memory.numpy()
    for offset, piece in copies:
        memory[offset : offset + piece.nbytes] = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
    return placed


def adapters_in(arena: Arena, kind: Format, rank: int) -> dict[int, PlacedAdapter]:
    """Three adapters: with affines of all modules, of one, of none."""
    free = list(range(NUM_CHUNKS, arena.num_chunks))
    placed = {}
    for slot, affines in enumerate(([0, 1, 2], [1], [])):
        placed[slot] = place(arena, free, rank=rank, kind=kind, affines=affines, seed=1000 * slot)
        free = free[placed[slot].chunks_used :]
    return placed


def compute(backend: Backend, slots: list[int], x: Tensor, y: Tensor, *, kind: Format, rank: int) -> Tensor:
    arena = make_arena(SHAPE, num_chunks=200)
    batch = batch_of([(0, 1)] * len(slots), adapters_in(arena, kind, rank), slots)
    step = backend.bind(arena, COS, SIN).step(batch)
    result = y.clone()
    step.lora_add(result, x, 1, Site.QKV)
    step.lora_add(result, x, 0, Site.QKV)  # the adapters do not attach there
    step.finish()
    return result


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("rank", [1, 16, 20])
@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_are_scaled_and_shifted_after_lora(backend: str, rank: int, kind: Format) -> None:
    slots = [-1, -1, 0, 0, 0, 1, 1, 2, 2, 2]
    x, y = randn(10, INNER, seed=7), randn(10, 256, seed=8)
    result = compute(BACKENDS[backend](), slots, x, y, kind=kind, rank=rank)
    expected = compute(ReferenceBackend(), slots, x, y, kind=kind, rank=rank)
    assert float((result - expected).norm() / expected.norm()) < 1e-5
    assert torch.equal(result[:2], y[:2])


def test_the_oracle_is_the_formula() -> None:
    """Modules without rank rows leave only the affine; y holds what the base gave, its bias included."""
    y = randn(3, 256, seed=8)
    result = compute(ReferenceBackend(), [0, 1, 2], randn(3, INNER), y, kind=Format.FLOAT32, rank=0)
    expected = y.clone()
    for row, seed, modules in ((0, 0, (0, 1, 2)), (1, 1000, (1,))):
        for number in modules:
            out, outer = MODULES[number]
            scale, shift = affine_of(outer, seed + 100 * number)
            expected[row, out : out + outer] = scale * y[row, out : out + outer] + shift
    assert torch.allclose(result, expected, atol=1e-6)


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
def test_a_row_is_the_same_bit_for_bit_whatever_shares_its_batch(kind: Format) -> None:
    backend = CpuBackend(shared_pool(2))
    x, y = randn(20, INNER, seed=7), randn(20, 256, seed=8)
    slots = [-1] * 2 + [0] * 9 + [1] * 2 + [2] * 7
    together = compute(backend, slots, x, y, kind=kind, rank=9)
    for row, slot in enumerate(slots):
        alone = compute(backend, [slot], x[row : row + 1], y[row : row + 1], kind=kind, rank=9)
        assert torch.equal(alone[0], together[row])


def test_a_base_in_whole_numbers_is_scaled_with_its_bias() -> None:
    linear = quantize_linear(Linear.plain(randn(256, INNER, dtype=torch.bfloat16), randn(256, seed=1)))
    results = []
    for backend in (CpuBackend(shared_pool(2)), ReferenceBackend()):
        arena = make_arena(SHAPE, num_chunks=200)
        step = backend.bind(arena, COS, SIN).step(batch_of([(0, 1)] * 3, adapters_in(arena, Format.INT8, 4), [0, 1, 2]))
        x = randn(3, INNER, seed=5)
        y = step.linear(backend.pack(linear), x)
        step.lora_add(y, x, 1, Site.QKV)
        step.finish()
        results.append(y.clone())
    assert float((results[0] - results[1]).norm() / results[1].norm()) < 1e-5


def test_groups_of_the_int4_format_fit_the_site() -> None:
    assert all(outer % 16 == 0 for _, outer in MODULES)
    assert INNER > INT4_GROUP  # the last group is a part
