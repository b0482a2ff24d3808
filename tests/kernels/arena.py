"""What kernel tests share: an arena, batches over it and random adapters in it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from worker.engine.plan import BASE_SLOT, SequenceStep
from worker.kernels.layout import Arena, AttentionShape, Batch, Site
from worker.kernels.tiles import INT4_GROUP, Format, PlacedAdapter, Tile, place_tiles
from worker.model.batch import build_step

NUM_CHUNKS = 40
NUM_LAYERS = 2
INT4 = {Format.INT4: np.float16, Format.INT4_WIDE: np.float32}
BYTES = {Format.FLOAT32: "<f4", Format.BFLOAT16: "<u2", Format.FLOAT16: "<f2", Format.INT8: "<i1"}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_arena(shape: AttentionShape, dtype: torch.dtype = torch.float32, *, num_chunks: int = NUM_CHUNKS) -> Arena:
    """An arena full of NaN, as one may be after use: bytes 0xFF are NaN in every float format."""
    arena = Arena(shape, num_chunks=num_chunks, dtype=dtype, device=torch.device("cpu"))
    arena.memory.fill_(0xFF)
    return arena


def sequences(lengths: Sequence[tuple[int, int]], slots: Sequence[int] | None = None) -> list[SequenceStep]:
    """(position, rows) of each; blocks scattered over the arena's first chunks, none shared."""
    order = torch.randperm(NUM_CHUNKS, generator=torch.Generator().manual_seed(1)).tolist()
    steps = []
    for index, (position, count) in enumerate(lengths):
        needed = (position + count + 15) // 16
        taken, order = order[:needed], order[needed:]
        slot = BASE_SLOT if slots is None else slots[index]
        steps.append(SequenceStep(index, (0,) * count, position, tuple(taken), slot, sample=True))
    return steps


def batch_of(lengths: Sequence[tuple[int, int]], adapters: dict[int, PlacedAdapter], slots: Sequence[int]) -> Batch:
    return build_step(sequences(lengths, slots), adapters.__getitem__).batch


def random_factor(rank: int, width: int, kind: Format, seed: int) -> np.ndarray:
    """Rank rows as they are stored."""
    generator = np.random.default_rng(seed)
    if kind in INT4:
        return generator.integers(0, 256, (rank, width // 2), dtype=np.uint8)
    if kind == Format.INT8:
        return generator.integers(-127, 128, (rank, width), dtype=np.int8)
    values = generator.standard_normal((rank, width), dtype=np.float32)
    if kind == Format.BFLOAT16:
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(BYTES[kind])


def random_scales(rank: int, width: int, kind: Format, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    if kind not in INT4:
        return generator.uniform(0.001, 0.01, rank).astype(np.float32)
    groups = -(-width // INT4_GROUP)
    return generator.uniform(0.01, 0.1, (rank, groups)).astype(INT4[kind])


def add_adapter(
    arena: Arena, chunk_ids: Sequence[int], modules: Sequence[tuple[int, int, int, Format]], *, inner: int, seed: int
) -> PlacedAdapter:
    """Place an adapter on layer 1's QKV site: modules of (rank, first output, outputs, format)."""
    tiles = []
    for number, (rank, out, outer, kind) in enumerate(modules):
        for first in range(0, rank, 16):
            ranks, at = min(16, rank - first), seed + 100 * number + first
            scale = random_scales(ranks, inner, kind, at)
            b_scale = random_scales(ranks, outer, kind, at + 1) if kind in INT4 else None
            a, b = random_factor(ranks, inner, kind, at + 2), random_factor(ranks, outer, kind, at + 3)
            tiles.append(Tile(len(Site) + Site.QKV, kind, out, inner, outer, a, b, scale, b_scale))
    placed, copies = place_tiles(
        tiles,
        version_digest=f"{seed}",
        num_places=NUM_LAYERS * len(Site),
        chunk_bytes=arena.chunk_bytes,
        chunk_ids=chunk_ids,
    )
    memory = arena.memory.numpy()
    for offset, piece in copies:
        memory[offset : offset + piece.nbytes] = piece.reshape(-1).view(np.uint8)
    return placed
