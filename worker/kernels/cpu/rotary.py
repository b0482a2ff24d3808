"""Rotary positions and the KV cache's writes, row by row; a task computes several neighbouring rows.

A block of the cache is `[layers][key, value][Hk][BLOCK_TOKENS][D]`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

from worker.kernels.cpu.numbers import COMPILED
from worker.kernels.layout import BLOCK_TOKENS


def narrow(value: Any, like: Any) -> Any:
    """Return a float32 as the cache stores it: itself, or rounded to the bits of a bfloat16 (to nearest even)."""
    raise NotImplementedError("for compiled code only")


@overload(narrow, inline="always", strict=False)
def _narrow(value: Any, like: Any) -> Any:  # noqa: ARG001 - the names are the signature's
    if like.dtype == types.float32:
        return lambda value, like: value  # noqa: ARG005

    def round_to_bf16(value: Any, like: Any) -> Any:  # noqa: ARG001
        bits = np.float32(value).view(np.uint32)
        if value != value:  # noqa: PLR0124 - NaN: rounding its bits could carry into the sign
            return np.uint16(0x7FC0)
        return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))

    return round_to_bf16


@njit(**COMPILED)
def _normalize(head: Any, weight: Any, eps: Any) -> None:
    total = np.float32(0)
    for d in range(len(head)):
        total += head[d] * head[d]
    factor = np.float32(1) / np.sqrt(total / np.float32(len(head)) + eps)
    for d in range(len(head)):
        head[d] = head[d] * factor * weight[d]


@njit(**COMPILED)
def _rotate(head: Any, cos: Any, sin: Any) -> None:
    half = len(cos)
    for d in range(half):
        first, second = head[d], head[half + d]
        head[d] = first * cos[d] - second * sin[d]
        head[half + d] = second * cos[d] + first * sin[d]


@njit(**COMPILED)
def rotate_and_store(
    qkv: Any,
    norm: Any,
    eps: Any,
    cos: Any,
    sin: Any,
    positions: Any,
    kv: Any,
    slots: Any,
    shape: Any,
    layer: int,
    first: int,
    end: int,
) -> None:
    """Normalize (if asked) and rotate rows' queries and keys in place, and write their keys and values to the cache.

    Rows first … end - 1 of qkv [T, (Hq + 2·Hk)·D] float32; norm [Hq + Hk, D] float32, empty for none; cos, sin
    [positions, D/2] float32; positions [T] int64; kv the cache, flat, float32 or uint16 (bfloat16 bits); slots [T]
    int64, block · BLOCK_TOKENS + offset; shape (Hq, Hk, D, elements of a block).
    """
    heads, kv_heads, dim, block_size = shape
    for row in range(first, end):
        block, offset = slots[row] // BLOCK_TOKENS, slots[row] % BLOCK_TOKENS
        at = positions[row]
        for h in range(heads + kv_heads):
            head = qkv[row, h * dim : (h + 1) * dim]
            if len(norm):
                _normalize(head, norm[h], eps)
            _rotate(head, cos[at], sin[at])
        for h in range(kv_heads):
            keys = block * block_size + (layer * 2 * kv_heads + h) * BLOCK_TOKENS * dim
            values = keys + kv_heads * BLOCK_TOKENS * dim
            k = qkv[row, (heads + h) * dim : (heads + h + 1) * dim]
            v = qkv[row, (heads + kv_heads + h) * dim : (heads + kv_heads + h + 1) * dim]
            for d in range(dim):
                kv[keys + offset * dim + d] = narrow(k[d], kv)
                kv[values + offset * dim + d] = narrow(v[d], kv)
