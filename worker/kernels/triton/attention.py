"""Attention and the rotation before it as functions of torch tensors: what a backend calls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.kernels.layout import AttentionShape
from worker.kernels.triton.attend import attend_kernel, combine_kernel
from worker.kernels.triton.platform import COMPILE, Platform, power_of_2
from worker.kernels.triton.rope import rope_kernel

KEYS_PER_SPLIT: Final = 256
"""Keys one decode program reads; fixed, so that a row's result depends on no other row."""
_KEYS_PER_BLOCK: Final = 64
_PREFILL_LINES: Final = 128
_PREFILL_WARPS: Final = 8  # with 4, registers spill on sm_80
_ROPE_HEADS: Final = 8
_COMBINE_SIDE: Final = 16


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """Rows to attend for in a step, the same for every layer: decodes, or parts of prompts."""

    items: Tensor
    """[items, 5] int32: first of the request's blocks, first row, rows (0: nothing to do), position of the first row,
    first key."""
    blocks: Tensor
    """[n] int32: chunk ids, each request's in the order of positions."""
    rows: Tensor | None
    """Decodes: [rows, 3] int32: row, its first item, its items; a row without any gets zeros. None for prompts."""


def queries_per_key(shape: AttentionShape) -> int:
    """Return how many query heads read the same keys."""
    return shape.num_heads // shape.num_kv_heads


def prefill_rows(shape: AttentionShape) -> int:
    """Return how many rows of one request a prefill program computes."""
    return max(1, _PREFILL_LINES // power_of_2(queries_per_key(shape)))


def decode_items(decodes: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Cut the keys of decodes [n, 3] (first block, row, position) into items; returns `AttentionWork`'s items and rows.

    The cut is by position alone, so that a row's result depends on no other row.
    """
    first_block, row, position = decodes.T
    pieces = position // KEYS_PER_SPLIT + 1
    first_item = np.cumsum(pieces) - pieces
    items = np.empty((int(pieces.sum()), 5), dtype=np.int32)
    for column, values in enumerate((first_block, row, np.ones_like(row), position)):
        items[:, column] = np.repeat(values, pieces)
    items[:, 4] = (np.arange(len(items)) - np.repeat(first_item, pieces)) * KEYS_PER_SPLIT
    return items, np.stack((row, first_item, pieces), axis=1).astype(np.int32)


def prefill_items(shape: AttentionShape, chunks: Sequence[tuple[int, int, int, int]]) -> NDArray[np.int32]:
    """Cut chunks (first block, first row, rows, position) into items of at most `prefill_rows` rows."""
    step = prefill_rows(shape)
    cut = [
        (block, row + done, min(step, rows - done), position + done, 0)
        for block, row, rows, position in chunks
        for done in range(0, rows, step)
    ]
    return np.array(cut, dtype=np.int32).reshape(-1, 5)


def attention_room(shape: AttentionShape, items: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the float32 buffers of partial results of so many items of decodes."""
    count = items * shape.num_heads
    return (
        torch.empty(count * shape.head_dim, dtype=torch.float32, device=device),
        torch.empty(count * 2, dtype=torch.float32, device=device),
    )


def attention(
    shape: AttentionShape,
    platform: Platform,
    q: Tensor,
    arena: Tensor,
    layer: int,
    work: AttentionWork,
    room: tuple[Tensor, Tensor],
    out: Tensor,
) -> None:
    """Compute out[row] = softmax(q · kᵀ / √D) v over what each row of the work may see; other rows are left alone.

    q, out [T, num_heads, head_dim] contiguous, 16-bit; arena uint8 bytes of whole chunks, whose keys and values of
    these rows are written already; room from `attention_room`, which only decodes use.
    """
    if not len(work.items):
        return
    decodes = work.rows is not None
    per_kv, dim_2 = queries_per_key(shape), power_of_2(shape.head_dim)
    attend_kernel[(len(work.items), shape.num_kv_heads)](
        q, arena, work.blocks, work.items, out, room[0], room[1], layer, math.log2(math.e) / math.sqrt(shape.head_dim),
        KV_HEADS=shape.num_kv_heads, PER_KV=per_kv, PER_KV_2=power_of_2(per_kv),
        DIM=shape.head_dim, DIM_2=dim_2, CHUNK_BYTES=shape.block_elements * q.element_size(),
        ROWS=1 if decodes else prefill_rows(shape), BLOCK=_KEYS_PER_BLOCK,
        PER_SPLIT=KEYS_PER_SPLIT if decodes else 1 << 30, PARTIAL=decodes, STAGES=platform.stages, DOT=platform.dot,
        num_warps=4 if decodes else _PREFILL_WARPS, **COMPILE,
    )  # fmt: skip
    if work.rows is not None:
        combine_kernel[(len(work.rows), shape.num_heads)](
            out, room[0], room[1], work.rows, HEADS=shape.num_heads, DIM=shape.head_dim, DIM_2=dim_2,
            SIDE=_COMBINE_SIDE, num_warps=2, **COMPILE,
        )  # fmt: skip


def rope(
    shape: AttentionShape,
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    q: Tensor,
    arena: Tensor,
    layer: int,
    *,
    delta: tuple[Tensor, Tensor] | None = None,
    norm: tuple[Tensor, float] | None = None,
) -> None:
    """Rotate queries into q, and write rotated keys and the values to the arena: see rope_kernel.

    qkv [T, (num_heads + 2 · num_kv_heads) · head_dim] contiguous; cos, sin [positions, head_dim / 2] float32; positions
    [T] int32; slots [T] int64, chunk · 16 + offset, negative for rows that write nothing; q [T, num_heads, head_dim].
    `delta` is a LoRA delta like qkv, and SiteWork.adapted; `norm` is QK-norm's
    weight [num_heads + num_kv_heads, head_dim] and eps.
    """
    heads = shape.num_heads + 2 * shape.num_kv_heads
    delta_of, adapted = delta or (qkv, positions)
    weight, eps = norm or (qkv, 0.0)
    rope_kernel[(len(qkv), -(-heads // _ROPE_HEADS))](
        qkv, delta_of, adapted, weight, cos, sin, positions, slots, q, arena, layer, eps,
        Q_HEADS=shape.num_heads, KV_HEADS=shape.num_kv_heads, DIM=shape.head_dim,
        HALF_2=power_of_2(shape.head_dim // 2), CHUNK_BYTES=shape.block_elements * qkv.element_size(),
        HEADS=_ROPE_HEADS, DELTA=delta is not None, NORM=norm is not None, LARGEST=torch.finfo(qkv.dtype).max,
        num_warps=4,
        **COMPILE,
    )  # fmt: skip
