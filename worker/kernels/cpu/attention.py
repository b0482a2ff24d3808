"""Paged attention over the KV cache.

A block of the cache is `[layers][key, value][Hk][BLOCK_TOKENS][D]`. A row is computed alike whether it comes alone or
with others of its request, and nothing past its own position has a part in its result: what a block held before does
not matter, not even NaN. Positions are taken in pieces that begin at multiples of PIECE_TOKENS: scores, weights, sums
of values; a further piece scales what the earlier ones have summed down to its own largest score.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic

from worker.kernels.cpu import vectors as v
from worker.kernels.cpu.atomics import address
from worker.kernels.cpu.numbers import exp_negative
from worker.kernels.cpu.products import BFLOAT16, add_scaled, dots
from worker.kernels.cpu.vectors import EXACT, LANES
from worker.kernels.layout import BLOCK_TOKENS

ROWS_AT_ONCE: Final = 8
"""Rows of one request that share a pass over its blocks."""

PIECE_TOKENS: Final = 256
"""Positions whose scores are there at a time."""

_PIECE_BLOCKS: Final = PIECE_TOKENS // BLOCK_TOKENS
_SCORE_BYTES: Final = 4 * PIECE_TOKENS
_AHEAD_BLOCKS: Final = 2
"""Blocks from the one that is read to the one that is fetched: memory takes longer to answer than one takes."""


@intrinsic
def _largest(typingctx: Any, scores: Any, count: Any) -> Any:  # noqa: ARG001 - the types are the signature
    """Return the largest of `count` float32, a multiple of eight, at an address."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        base, index = v.pointer(builder, arguments[0]), v.INDEX
        top = v.variable(builder, v.load(builder, base, index(0)))
        with v.loop(builder, arguments[1], step=v.LANES) as (t, _):
            value = v.load(builder, base, builder.mul(t, index(4)))
            builder.store(v.larger(builder, value, builder.load(top)), top)
        return v.first(builder, v.across(builder, builder.load(top), lambda a, b: v.larger(builder, a, b)))

    return types.float32(scores, count), generate


@intrinsic
def _weigh(typingctx: Any, scores: Any, count: Any, top: Any) -> Any:  # noqa: ARG001 - the types are the signature
    """Replace `count` scores, a multiple of eight, at an address by exp(score - top), and return their sum."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        base, index = v.pointer(builder, arguments[0]), v.INDEX
        largest = v.splat(builder, arguments[2])
        total = v.variable(builder, v.constant(0.0))
        with v.loop(builder, arguments[1], step=v.LANES) as (t, _):
            offset = builder.mul(t, index(4))
            weight = v.exp_negative(builder, builder.fsub(v.load(builder, base, offset), largest))
            v.store(builder, weight, base, offset)
            builder.store(builder.fadd(builder.load(total), weight), total)
        return v.first(builder, v.across(builder, builder.load(total), builder.fadd))

    return types.float32(scores, count, top), generate


@njit(**EXACT)
def _weigh_piece(scores: Any, seen: int, has_sums: bool, top: Any, total: Any, acc: Any, query: int, dim: int) -> None:
    """Make weights of a query's scores of a piece, of which it sees `seen`, and of what it has summed before."""
    whole = (seen + LANES - 1) // LANES * LANES
    scores[query, seen:whole] = -np.inf
    at = scores.ctypes.data + query * _SCORE_BYTES
    largest = _largest(at, whole)
    if not has_sums:
        top[query] = largest
        total[query] = _weigh(at, whole, largest)
        return
    before = top[query]
    top[query] = max(before, largest)
    factor = exp_negative(before - top[query])
    total[query] = total[query] * factor + _weigh(at, whole, top[query])
    for d in range(dim):
        acc[query, d] *= factor


@njit(**EXACT)
def attend(
    qkv: int,
    qkv_stride: int,
    positions: Any,
    kind: int,
    kv: int,
    tables: Any,
    items: Any,
    shape: Any,
    layer: int,
    out: int,
    task: int,
) -> None:
    """Write softmax(q·kᵀ / sqrt(D)) v over each row's own and earlier positions, for an item and a key/value head.

    qkv [T, (Hq + 2·Hk)·D] float32, rotated, and out [T, Hq·D] float32 addresses, qkv's stride in bytes; positions [T]
    int64; kv the cache's address, of `kind`, the step's keys and values written; tables [S, blocks] int64 block ids of
    each request; items [n, 3] int64: request, first row, rows (≤ ROWS_AT_ONCE, neighbours in position); shape (Hq, Hk,
    D, elements of a block); task < n · Hk. Query head h reads key head h // (Hq / Hk).
    """
    heads, kv_heads, dim, block_size = shape
    group = heads // kv_heads
    size = 2 if kind == BFLOAT16 else 4
    item, kv_head = task // kv_heads, task % kv_heads
    request, first, rows = items[item, 0], items[item, 1], items[item, 2]
    row_bytes, head_bytes, stored_bytes = 4 * dim, size * BLOCK_TOKENS * dim, size * dim
    keys_at = (layer * 2 * kv_heads + kv_head) * head_bytes
    values_at = keys_at + kv_heads * head_bytes
    # Of each row and head of the group: the query, the weighted sum of values, the largest score and the sum of weights
    # so far, and a piece's scores.
    queries = rows * group
    room = np.empty(queries * (2 * dim + 2 + PIECE_TOKENS), np.float32)
    q, room = room[: queries * dim].reshape((queries, dim)), room[queries * dim :]
    acc, room = room[: queries * dim].reshape((queries, dim)), room[queries * dim :]
    top, total, scores = (
        room[:queries],
        room[queries : 2 * queries],
        room[2 * queries :].reshape((queries, PIECE_TOKENS)),
    )
    q_at, acc_at, scores_at = q.ctypes.data, acc.ctypes.data, scores.ctypes.data
    places = np.empty(2 * _PIECE_BLOCKS + _AHEAD_BLOCKS, np.int64)
    scale = np.float32(1) / np.sqrt(np.float32(dim))
    for r in range(rows):
        at = qkv + (first + r) * qkv_stride + kv_head * group * row_bytes
        given = carray(address(at), (group, dim), np.float32)
        for j in range(group):
            for d in range(dim):
                q[r * group + j, d] = given[j, d] * scale
    acc[:] = 0
    start = positions[first]
    for piece in range(0, start + rows, PIECE_TOKENS):
        blocks = (min(start + rows - piece, PIECE_TOKENS) + BLOCK_TOKENS - 1) // BLOCK_TOKENS
        # Where the piece's keys lie, and its values; then what is likely to be next: the next head's keys.
        for b in range(blocks):
            at = kv + tables[request, piece // BLOCK_TOKENS + b] * block_size * size
            places[b], places[blocks + b] = at + keys_at, at + values_at
        for b in range(_AHEAD_BLOCKS):
            places[2 * blocks + b] = places[min(b, blocks - 1)] + head_bytes
        for b in range(blocks):
            before = max(piece + b * BLOCK_TOKENS - start, 0) * group  # queries that do not see any of the block
            dots(
                *(kind, q_at + before * row_bytes, row_bytes, queries - before, places[b], stored_bytes),
                *(BLOCK_TOKENS, dim, scores_at + before * _SCORE_BYTES + 4 * b * BLOCK_TOKENS, _SCORE_BYTES),
                places[b + _AHEAD_BLOCKS],
            )
        for r in range(max(piece - start, 0), rows):
            seen = min(start + r + 1 - piece, PIECE_TOKENS)
            for i in range(r * group, (r + 1) * group):
                _weigh_piece(scores, seen, piece > 0, top, total, acc, i, dim)
        for b in range(blocks):
            begin = piece + b * BLOCK_TOKENS
            r = max(begin - start, 0)
            while r < rows:
                # Rows that see a part of the block come one by one, then those that see all of it together.
                taken, seen = 1, start + r + 1 - begin
                if seen >= BLOCK_TOKENS:
                    taken, seen = rows - r, BLOCK_TOKENS
                i = r * group
                add_scaled(
                    *(kind, scores_at + i * _SCORE_BYTES + 4 * b * BLOCK_TOKENS, _SCORE_BYTES, taken * group, seen),
                    *(places[blocks + b], stored_bytes, acc_at + i * row_bytes, row_bytes, dim),
                    places[blocks + b + _AHEAD_BLOCKS],
                )
                r += taken
    for r in range(rows):
        at = out + ((first + r) * heads + kv_head * group) * row_bytes
        to = carray(address(at), (group, dim), np.float32)
        for j in range(group):
            factor = np.float32(1) / total[r * group + j]
            for d in range(dim):
                to[j, d] = acc[r * group + j, d] * factor
