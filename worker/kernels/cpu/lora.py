"""The adapters' part of a linear layer, every row with its own adapter's factors in their own format.

Factors are tiles in the arena (`worker.kernels.tiles`). A row is computed alone, in one order, so its result does not
depend on the batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from worker.kernels.cpu.numbers import COMPILED, widen
from worker.kernels.tiles import INT4_GROUP, TILE_RANKS, Field, Format

# Compiled code knows plain numbers only.
_FORMAT, _RANKS, _INNER, _OUTER, _OUT, _A, _B, _SCALE, _B_SCALE = (int(field) for field in Field)
_FLOAT32, _BFLOAT16, _FLOAT16, _INT8, _INT4, _ = (int(kind) for kind in Format)


@njit(**COMPILED)
def _shrink(x: Any, a: Any, h: Any) -> None:
    """h[j] = Σ_k a[j, k] · x[k]."""
    ranks, inner = a.shape
    j = 0
    while j + 4 <= ranks:
        a0, a1, a2, a3 = a[j], a[j + 1], a[j + 2], a[j + 3]
        s0 = s1 = s2 = s3 = np.float32(0)
        for k in range(inner):
            u = x[k]
            s0 += u * widen(a0[k])
            s1 += u * widen(a1[k])
            s2 += u * widen(a2[k])
            s3 += u * widen(a3[k])
        h[j], h[j + 1], h[j + 2], h[j + 3] = s0, s1, s2, s3
        j += 4
    while j < ranks:
        row = a[j]
        s = np.float32(0)
        for k in range(inner):
            s += x[k] * widen(row[k])
        h[j] = s
        j += 1


@njit(**COMPILED)
def _expand(h: Any, b: Any, y: Any) -> None:
    """y[n] += Σ_j h[j] · b[j, n]."""
    ranks, outer = b.shape
    j = 0
    while j + 4 <= ranks:
        h0, h1, h2, h3 = h[j], h[j + 1], h[j + 2], h[j + 3]
        b0, b1, b2, b3 = b[j], b[j + 1], b[j + 2], b[j + 3]
        for n in range(outer):
            y[n] += h0 * widen(b0[n]) + h1 * widen(b1[n]) + h2 * widen(b2[n]) + h3 * widen(b3[n])
        j += 4
    while j < ranks:
        factor, row = h[j], b[j]
        for n in range(outer):
            y[n] += factor * widen(row[n])
        j += 1


@njit(**COMPILED)
def _shrink4(x: Any, a: Any, scales: Any, h: Any) -> None:
    """h[j] = Σ_k a[j, k] · x[k], a in nibbles with a scale per group of a row."""
    for j in range(len(a)):
        total = np.float32(0)
        for g in range(scales.shape[1]):
            first = g * INT4_GROUP
            half = min(INT4_GROUP, len(x) - first) // 2
            packed = a[j, first // 2 : first // 2 + half]
            low, high = x[first : first + half], x[first + half : first + 2 * half]
            s = np.float32(0)
            for k in range(half):
                s += low[k] * np.float32(np.int32(packed[k] & np.uint8(15)) - np.int32(8))
                s += high[k] * np.float32(np.int32(packed[k] >> np.uint8(4)) - np.int32(8))
            total += s * widen(scales[j, g])
        h[j] = total


@njit(**COMPILED)
def _expand4(h: Any, b: Any, scales: Any, y: Any) -> None:
    """y[n] += Σ_j h[j] · b[j, n], b in nibbles with a scale per group of a row."""
    for j in range(len(b)):
        for g in range(scales.shape[1]):
            first = g * INT4_GROUP
            half = min(INT4_GROUP, len(y) - first) // 2
            packed = b[j, first // 2 : first // 2 + half]
            low, high = y[first : first + half], y[first + half : first + 2 * half]
            factor = h[j] * widen(scales[j, g])
            for n in range(half):
                low[n] += factor * np.float32(np.int32(packed[n] & np.uint8(15)) - np.int32(8))
                high[n] += factor * np.float32(np.int32(packed[n] >> np.uint8(4)) - np.int32(8))


@njit(**COMPILED)
def _tile4(x: Any, arena: Any, record: Any, h: Any, out: Any) -> None:
    ranks, inner, outer = record[_RANKS], record[_INNER], record[_OUTER]
    a = arena[record[_A] : record[_A] + ranks * inner // 2].reshape((ranks, inner // 2))
    b = arena[record[_B] : record[_B] + ranks * outer // 2].reshape((ranks, outer // 2))
    inner_groups, outer_groups = (inner + INT4_GROUP - 1) // INT4_GROUP, (outer + INT4_GROUP - 1) // INT4_GROUP
    scale, b_scale = record[_SCALE], record[_B_SCALE]
    a_scales, b_scales = ranks * inner_groups, ranks * outer_groups
    if record[_FORMAT] == _INT4:
        _shrink4(x, a, arena[scale : scale + 2 * a_scales].view(np.int16).reshape((ranks, inner_groups)), h)
        _expand4(h, b, arena[b_scale : b_scale + 2 * b_scales].view(np.int16).reshape((ranks, outer_groups)), out)
    else:
        _shrink4(x, a, arena[scale : scale + 4 * a_scales].view(np.float32).reshape((ranks, inner_groups)), h)
        _expand4(h, b, arena[b_scale : b_scale + 4 * b_scales].view(np.float32).reshape((ranks, outer_groups)), out)


@njit(**COMPILED)
def _tile(x: Any, arena: Any, record: Any, h: Any, y: Any) -> None:
    kind, ranks, inner, outer = record[_FORMAT], record[_RANKS], record[_INNER], record[_OUTER]
    a, b, scale = record[_A], record[_B], record[_SCALE]
    out = y[record[_OUT] : record[_OUT] + outer]
    if kind == _FLOAT32:
        _shrink(x, arena[a : a + 4 * ranks * inner].view(np.float32).reshape((ranks, inner)), h)
    elif kind == _BFLOAT16:
        _shrink(x, arena[a : a + 2 * ranks * inner].view(np.uint16).reshape((ranks, inner)), h)
    elif kind == _FLOAT16:
        _shrink(x, arena[a : a + 2 * ranks * inner].view(np.int16).reshape((ranks, inner)), h)
    elif kind == _INT8:
        _shrink(x, arena[a : a + ranks * inner].view(np.int8).reshape((ranks, inner)), h)
    else:
        _tile4(x, arena, record, h, out)
        return
    factors = arena[scale : scale + 4 * ranks].view(np.float32)
    for j in range(ranks):
        h[j] *= factors[j]
    if kind == _FLOAT32:
        _expand(h, arena[b : b + 4 * ranks * outer].view(np.float32).reshape((ranks, outer)), out)
    elif kind == _BFLOAT16:
        _expand(h, arena[b : b + 2 * ranks * outer].view(np.uint16).reshape((ranks, outer)), out)
    elif kind == _FLOAT16:
        _expand(h, arena[b : b + 2 * ranks * outer].view(np.int16).reshape((ranks, outer)), out)
    else:
        _expand(h, arena[b : b + ranks * outer].view(np.int8).reshape((ranks, outer)), out)


@njit(**COMPILED)
def lora_add(
    x: Any, arena: Any, records: Any, starts: Any, place: int, rows: Any, groups: Any, y: Any, task: int
) -> None:
    """Add scale · B (A x) of a row's adapter at one site of one layer to y, in place.

    x [T, K], y [T, N] float32; arena flat uint8; records [n, 9] int64 (`Field`); starts [G, layers · 4 + 1] int64,
    the first record of each place (layer · 4 + site) of the adapters in the batch; rows [R] int64, the rows that have
    an adapter, and groups [R] int64 which one of G; task < R.
    """
    row, group = rows[task], groups[task]
    h = np.empty(TILE_RANKS, np.float32)
    for record in range(starts[group, place], starts[group, place + 1]):
        _tile(x[row], arena, records[record], h, y[row])
