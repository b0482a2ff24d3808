"""Attention and the rotation before it as functions of torch tensors: what a backend calls."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.kernels.triton.attend import attend_kernel, combine_kernel
from worker.kernels.triton.platform import COMPILE, Platform, power_of_2
from worker.kernels.triton.rope import rope_kernel

BLOCK_TOKENS: Final = 16
KEYS_PER_SPLIT: Final = 256
"""Keys one decode program reads; fixed, so that a row's result depends on no other row."""
_KEYS_PER_BLOCK: Final = 64
_PREFILL_LINES: Final = 128
_PREFILL_WARPS: Final = 8  # with 4, registers spill on sm_80
_ROPE_HEADS: Final = 8


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """A base model's heads, and the chunk that holds 16 positions of all its layers."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def per_kv(self) -> int:
        """Query heads that read the same keys."""
        return self.num_heads // self.num_kv_heads

    def chunk_bytes(self, itemsize: int) -> int:
        """Bytes of a chunk [layers][2][kv_heads][16][head_dim]."""
        return self.num_layers * 2 * self.num_kv_heads * BLOCK_TOKENS * self.head_dim * itemsize

    @property
    def prefill_rows(self) -> int:
        """Rows of one request that a prefill program computes."""
        return max(1, _PREFILL_LINES // power_of_2(self.per_kv))


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """Rows to attend for in a step, the same for every layer."""

    items: Tensor
    """[items, 4] int32: request, first row, rows (0: nothing to do), position of the first row."""
    blocks: Tensor
    """[requests, most blocks] int32: chunk ids in the order of positions."""
    rows_per_item: int
    """1 for decodes, else AttentionShape.prefill_rows."""
    most_keys: int
    """No row sees more positions. May be larger than need be: it sizes grids and partial results only."""

    @property
    def splits(self) -> int:
        """Programs that share a decode's keys."""
        return -(-self.most_keys // KEYS_PER_SPLIT) if self.rows_per_item == 1 else 1


def prefill_items(shape: AttentionShape, chunks: list[tuple[int, int, int, int]]) -> NDArray[np.int32]:
    """Cut chunks (request, first row, rows, position) into items of at most `shape.prefill_rows` rows."""
    step = shape.prefill_rows
    cut = [
        (request, row + done, min(step, rows - done), position + done)
        for request, row, rows, position in chunks
        for done in range(0, rows, step)
    ]
    return np.array(cut, dtype=np.int32).reshape(-1, 4)


def attention_room(shape: AttentionShape, work: AttentionWork, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the float32 buffers of partial results; empty where nothing is split."""
    count = len(work.items) * shape.num_heads * work.splits if work.splits > 1 else 0
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
    these rows are written already; room from `attention_room`.
    """
    if not len(work.items):
        return
    splits = work.splits
    dim_2 = power_of_2(shape.head_dim)
    per_split = KEYS_PER_SPLIT if work.rows_per_item == 1 else 1 << 30
    attend_kernel[(len(work.items), shape.num_kv_heads, splits)](
        q, arena, work.blocks, work.items, out, room[0], room[1], layer, work.blocks.stride(0),
        math.log2(math.e) / math.sqrt(shape.head_dim),
        KV_HEADS=shape.num_kv_heads, PER_KV=shape.per_kv, PER_KV_2=power_of_2(shape.per_kv),
        DIM=shape.head_dim, DIM_2=dim_2, CHUNK_BYTES=shape.chunk_bytes(q.element_size()), ROWS=work.rows_per_item,
        BLOCK=_KEYS_PER_BLOCK, PER_SPLIT=per_split, SPLITS=splits, STAGES=platform.stages, DOT=platform.dot,
        num_warps=4 if work.rows_per_item == 1 else _PREFILL_WARPS, **COMPILE,
    )  # fmt: skip
    if splits > 1:
        combine_kernel[(len(work.items), shape.num_heads)](
            out, room[0], room[1], work.items, HEADS=shape.num_heads, DIM=shape.head_dim, DIM_2=dim_2,
            PER_SPLIT=KEYS_PER_SPLIT, SPLITS=splits, SPLITS_2=power_of_2(splits), num_warps=2, **COMPILE,
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
        HALF_2=power_of_2(shape.head_dim // 2), CHUNK_BYTES=shape.chunk_bytes(qkv.element_size()),
        HEADS=_ROPE_HEADS, DELTA=delta is not None, NORM=norm is not None, LARGEST=torch.finfo(qkv.dtype).max,
        num_warps=4,
        **COMPILE,
    )  # fmt: skip
