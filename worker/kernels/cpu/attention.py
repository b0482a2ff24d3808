"""Rotary positions, the KV cache's writes and paged attention.

A block of the cache is `[layers][key, value][Hk][BLOCK_TOKENS][D]`. A row is computed alike whether it comes alone or
with others of its request, and nothing past its own position has a part in its result: what a block held before does
not matter, not even NaN.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import njit, types
from numba.extending import overload

from worker.kernels.cpu.numbers import COMPILED, exp_negative, widen
from worker.kernels.layout import BLOCK_TOKENS

ROWS_AT_ONCE: Final = 8
"""Rows of one request that share a pass over its blocks."""


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
    row: int,
) -> None:
    """Normalize (if asked) and rotate a row's queries and keys in place, and write its keys and values to the cache.

    qkv [T, (Hq + 2·Hk)·D] float32; norm [Hq + Hk, D] float32, empty for none; cos, sin [positions, D/2] float32;
    positions [T] int64; kv the cache, flat, float32 or uint16 (bfloat16 bits); slots [T] int64, block ·
    BLOCK_TOKENS + offset; shape (Hq, Hk, D, elements of a block).
    """
    heads, kv_heads, dim, block_size = shape
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


@njit(**COMPILED)
def _scores(q: Any, keys: Any, scale: Any, out: Any) -> None:
    """out[o] = scale · Σ_d q[d] · keys[o, d] for the block's BLOCK_TOKENS keys."""
    dim = len(q)
    for o in range(0, BLOCK_TOKENS, 4):
        k0, k1 = keys[o * dim : (o + 1) * dim], keys[(o + 1) * dim : (o + 2) * dim]
        k2, k3 = keys[(o + 2) * dim : (o + 3) * dim], keys[(o + 3) * dim : (o + 4) * dim]
        s0 = s1 = s2 = s3 = np.float32(0)
        for d in range(dim):
            u = q[d]
            s0 += u * widen(k0[d])
            s1 += u * widen(k1[d])
            s2 += u * widen(k2[d])
            s3 += u * widen(k3[d])
        out[o], out[o + 1], out[o + 2], out[o + 3] = s0 * scale, s1 * scale, s2 * scale, s3 * scale


@njit(**COMPILED)
def _softmax(scores: Any) -> Any:
    """Replace scores by exp(score - max), and return 1 / their sum."""
    top = scores[0]
    for t in range(len(scores)):
        top = max(top, scores[t])
    total = np.float32(0)
    for t in range(len(scores)):
        weight = exp_negative(scores[t] - top)
        scores[t] = weight
        total += weight
    return np.float32(1) / total


@njit(**COMPILED)
def _gather(weights: Any, values: Any, out: Any) -> None:
    """out[d] += Σ_o weights[o] · values[o, d] over the block's first len(weights) values."""
    dim, count = len(out), len(weights)
    o = 0
    while o + 4 <= count:
        w0, w1, w2, w3 = weights[o], weights[o + 1], weights[o + 2], weights[o + 3]
        v0 = values[o * dim : (o + 1) * dim]
        v1 = values[(o + 1) * dim : (o + 2) * dim]
        v2 = values[(o + 2) * dim : (o + 3) * dim]
        v3 = values[(o + 3) * dim : (o + 4) * dim]
        for d in range(dim):
            out[d] += w0 * widen(v0[d]) + w1 * widen(v1[d]) + w2 * widen(v2[d]) + w3 * widen(v3[d])
        o += 4
    while o < count:
        w, v = weights[o], values[o * dim : (o + 1) * dim]
        for d in range(dim):
            out[d] += w * widen(v[d])
        o += 1


@njit(**COMPILED)
def attend(
    qkv: Any, positions: Any, kv: Any, tables: Any, items: Any, shape: Any, layer: int, out: Any, task: int
) -> None:
    """Write softmax(q·kᵀ / sqrt(D)) v over each row's own and earlier positions, for an item and a key/value head.

    qkv [T, (Hq + 2·Hk)·D] float32, rotated; kv, shape as above, the step's keys and values written; tables [S, blocks]
    int64 block ids of each request; items [n, 3] int64: request, first row, rows (≤ ROWS_AT_ONCE, neighbours in
    position); out [T, Hq·D] float32; task < n · Hk. Query head h reads key head h // (Hq / Hk).
    """
    heads, kv_heads, dim, block_size = shape
    group = heads // kv_heads
    scale = np.float32(1) / np.sqrt(np.float32(dim))
    block_elements = BLOCK_TOKENS * dim
    item, kv_head = task // kv_heads, task % kv_heads
    request, first, rows = items[item, 0], items[item, 1], items[item, 2]
    blocks = positions[first + rows - 1] // BLOCK_TOKENS + 1
    scores = np.empty((rows * group, blocks * BLOCK_TOKENS), np.float32)
    acc = np.zeros((rows * group, dim), np.float32)
    factor = np.empty(rows * group, np.float32)
    keys_at = (layer * 2 * kv_heads + kv_head) * block_elements
    values_at = keys_at + kv_heads * block_elements
    for b in range(blocks):
        at = tables[request, b] * block_size + keys_at
        keys = kv[at : at + block_elements]
        for r in range(rows):
            if positions[first + r] >= b * BLOCK_TOKENS:
                for j in range(group):
                    h = kv_head * group + j
                    block_scores = scores[r * group + j, b * BLOCK_TOKENS : (b + 1) * BLOCK_TOKENS]
                    _scores(qkv[first + r, h * dim : (h + 1) * dim], keys, scale, block_scores)
    for r in range(rows):
        for j in range(group):
            factor[r * group + j] = _softmax(scores[r * group + j, : positions[first + r] + 1])
    for b in range(blocks):
        at = tables[request, b] * block_size + values_at
        values = kv[at : at + block_elements]
        for r in range(rows):
            seen = min(positions[first + r] + 1 - b * BLOCK_TOKENS, BLOCK_TOKENS)
            if seen > 0:
                for j in range(group):
                    start = b * BLOCK_TOKENS
                    _gather(scores[r * group + j, start : start + seen], values, acc[r * group + j])
    for r in range(rows):
        for j in range(group):
            h = kv_head * group + j
            for d in range(dim):
                out[first + r, h * dim + d] = acc[r * group + j, d] * factor[r * group + j]
