"""The adapters' part of a linear layer, every row with its own adapter's factors in their own format.

Factors are tiles in the arena (`worker.kernels.tiles`). Rows of one adapter share a pass over them, and each is
computed as it would be alone.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import carray, njit

from worker.kernels.cpu.atomics import address
from worker.kernels.cpu.numbers import widen
from worker.kernels.cpu.products import BFLOAT16, FLOAT32, INT8, add_scaled, dots
from worker.kernels.cpu.unpacking import unpack_halves, unpack_nibbles
from worker.kernels.cpu.vectors import EXACT, stack_floats
from worker.kernels.tiles import AFFINE, INT4_GROUP, TILE_RANKS, Field, Format

LORA_ROWS_AT_ONCE: Final = 6
"""Rows of one adapter that a task computes with one pass over its factors."""

# Compiled code knows plain numbers only.
_FORMAT, _RANKS, _INNER, _OUTER, _OUT, _A, _B, _SCALE, _B_SCALE = (int(field) for field in Field)
_FLOAT16, _INT4, _INT4_WIDE = int(Format.FLOAT16), int(Format.INT4), int(Format.INT4_WIDE)
_H_FLOATS: Final = LORA_ROWS_AT_ONCE * TILE_RANKS
_H_BYTES: Final = 4 * TILE_RANKS
_UNPACKED_RANKS: Final = 8
"""Rank rows that are unpacked at a time where loads do not widen: few enough to stay in the caches."""


@njit(**EXACT)
def _unpack(kind: int, stored: int, scale: int, width: int, first: int, ranks: int, out: int) -> None:
    """Write `ranks` rank rows from `first` on of a factor with rows of `width` values as float32, scales folded in."""
    if kind == _FLOAT16:
        unpack_halves(stored + 2 * first * width, ranks * width, out)
        return
    groups = (width + INT4_GROUP - 1) // INT4_GROUP
    narrow = carray(address(scale), ((first + ranks) * groups,), np.int16)
    wide = carray(address(scale), ((first + ranks) * groups,), np.float32)
    for j in range(ranks):
        for g in range(groups):
            index, column = (first + j) * groups + g, g * INT4_GROUP
            half = min(INT4_GROUP, width - column) // 2
            factor = widen(narrow[index]) if kind == _INT4 else wide[index]
            at = stored + ((first + j) * width + column) // 2
            unpack_nibbles(at, half, factor, out + 4 * (j * width + column))


@njit(**EXACT)
def _tile(record: Any, arena: int, x: int, x_stride: int, rows: int, y: int, y_stride: int, ahead: int) -> None:
    """Add a tile's part to some rows, and let what lies at `ahead` be fetched meanwhile."""
    kind, ranks, inner, outer = record[_FORMAT], record[_RANKS], record[_INNER], record[_OUTER]
    a, b, scale, b_scale = arena + record[_A], arena + record[_B], arena + record[_SCALE], arena + record[_B_SCALE]
    out = y + 4 * record[_OUT]
    h = stack_floats(_H_FLOATS)
    if kind in (FLOAT32, BFLOAT16, INT8):
        size = 1
        if kind == FLOAT32:
            size = 4
        elif kind == BFLOAT16:
            size = 2
        dots(kind, x, x_stride, rows, a, size * inner, ranks, inner, h, _H_BYTES, b)
        _multiply(h, rows, scale, ranks)
        add_scaled(kind, h, _H_BYTES, rows, ranks, b, size * outer, out, y_stride, outer, ahead)
        return
    unpacked = np.empty(_UNPACKED_RANKS * max(inner, outer), np.float32)
    at = unpacked.ctypes.data
    for j in range(0, ranks, _UNPACKED_RANKS):
        count = min(_UNPACKED_RANKS, ranks - j)
        _unpack(kind, a, scale, inner, j, count, at)
        dots(FLOAT32, x, x_stride, rows, at, 4 * inner, count, inner, h, _H_BYTES, at)
        if kind == _FLOAT16:
            _multiply(h, rows, scale + 4 * j, count)
        _unpack(kind, b, b_scale, outer, j, count, at)
        add_scaled(FLOAT32, h, _H_BYTES, rows, count, at, 4 * outer, out, y_stride, outer, at)


@njit(**EXACT)
def _multiply(h: int, rows: int, scale: int, ranks: int) -> None:
    factors = carray(address(scale), (ranks,), np.float32)
    for r in range(rows):
        row = carray(address(h + r * _H_BYTES), (ranks,), np.float32)
        for j in range(ranks):
            row[j] *= factors[j]


@njit(**EXACT)
def _affine(record: Any, arena: int, rows: int, y: int, y_stride: int) -> None:
    """Compute y <- scale · y + shift for a record's columns of some rows; elementwise, so as alone in any form."""
    columns = record[_OUTER]
    scale = carray(address(arena + record[_A]), (columns,), np.float32)
    shift = carray(address(arena + record[_B]), (columns,), np.float32)
    for r in range(rows):
        out = carray(address(y + r * y_stride + 4 * record[_OUT]), (columns,), np.float32)
        for n in range(columns):
            out[n] = scale[n] * out[n] + shift[n]


@njit(**EXACT)
def lora_add(
    x: int,
    x_stride: int,
    arena: int,
    records: Any,
    starts: Any,
    place: int,
    items: Any,
    y: int,
    y_stride: int,
    task: int,
) -> None:
    """Add scale · B (A x) of an item's adapter at one site of one layer to its rows of y, in place, then its affines.

    x [T, K], y [T, N] addresses of float32, strides in bytes; arena its address; records [n, 9] int64 (`Field`); starts
    [G, layers · 4 + 1] int64, the first record of each place (layer · 4 + site) of the adapters in the batch; items
    [I, 3] int64: which one of G, first row, rows (≤ LORA_ROWS_AT_ONCE); task < I.
    """
    group, first, rows = items[task, 0], items[task, 1], items[task, 2]
    last = starts[group, starts.shape[1] - 1] - 1
    for index in range(starts[group, place], starts[group, place + 1]):
        ahead = arena + records[min(index + 1, last), _A]  # the next site's when this one's have been computed
        if records[index, _FORMAT] == AFFINE:
            _affine(records[index], arena, rows, y + first * y_stride, y_stride)
        else:
            _tile(records[index], arena, x + first * x_stride, x_stride, rows, y + first * y_stride, y_stride, ahead)
