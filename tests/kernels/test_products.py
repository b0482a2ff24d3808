"""Products in all their forms against float64, each row as it would be alone, and nothing read past the ends."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kernels.arena import random_factor
from worker.kernels.cpu.products import DOTS_AT_ONCE, add_scaled, dots
from worker.kernels.cpu.vectors import WIDENED
from worker.kernels.tiles import Format

ROWS = 9
COUNTS = (1, 3, 8, 11, 16)
WIDTHS = (1, 7, 8, 65, 192)


def stored_between_nans(count: int, width: int, kind: Format) -> tuple[NDArray[np.generic], NDArray[np.float32]]:
    """Return `count` random vectors of a format, before and behind them bytes that are NaN, and the same widened."""
    values = random_factor(count, width, kind, seed=count * width)
    room = np.full(values.nbytes + 128, 0xFF, np.uint8)
    stored = room[64 : 64 + values.nbytes].view(values.dtype).reshape(values.shape)
    stored[:] = values
    if kind == Format.BFLOAT16:
        return stored, (stored.astype(np.uint32) << 16).view(np.float32)
    return stored, stored.astype(np.float32)


def rows_between_nans(width: int, seed: int) -> NDArray[np.float32]:
    room = np.full((ROWS, width + 16), np.nan, np.float32)
    rows = room[:, 8 : 8 + width]
    rows[:] = np.random.default_rng(seed).standard_normal((ROWS, width))
    return rows


def compute_dots(kind: Format, x: NDArray[np.float32], rows: int, stored: NDArray[np.generic]) -> NDArray[np.float32]:
    count, inner = stored.shape
    out = np.full((ROWS, -(-count // DOTS_AT_ONCE) * DOTS_AT_ONCE + 1), np.inf, np.float32)
    at, strides = stored.ctypes.data, (x.strides[0], stored.strides[0])
    dots(kind, x.ctypes.data, strides[0], rows, at, strides[1], count, inner, out.ctypes.data, out.strides[0], at)
    assert (out[rows:] == np.inf).all()
    assert (out[:, -1] == np.inf).all()
    return out[:rows, :count]


def compute_add(
    kind: Format, h: NDArray[np.float32], rows: int, stored: NDArray[np.generic], y: NDArray[np.float32]
) -> NDArray[np.float32]:
    room = np.full((ROWS, y.shape[1] + 16), np.inf, np.float32)
    out = room[:, 8:-8]
    out[:] = y
    at, strides = stored.ctypes.data, (h.strides[0], stored.strides[0], out.strides[0])
    columns = stored.shape[1]
    add_scaled(
        *(kind, h.ctypes.data, strides[0], rows, len(stored), at, strides[1], out.ctypes.data, strides[2], columns, at)
    )
    assert (room[:, :8] == np.inf).all()
    assert (room[:, -8:] == np.inf).all()
    assert np.array_equal(out[rows:], y[rows:])
    return out[:rows]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", WIDENED)
def test_dots(kind: Format, count: int, width: int) -> None:
    stored, wide = stored_between_nans(count, width, kind)
    x = rows_between_nans(width, seed=1)
    expected = x.astype(np.float64) @ wide.astype(np.float64).T
    size = np.abs(x.astype(np.float64)) @ np.abs(wide.astype(np.float64)).T
    all_rows = compute_dots(kind, x, ROWS, stored)
    assert (np.abs(all_rows - expected) <= 1e-6 * size).all()
    for rows in range(1, ROWS):
        assert np.array_equal(compute_dots(kind, x, rows, stored), all_rows[:rows])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", WIDENED)
def test_add_scaled(kind: Format, count: int, width: int) -> None:
    stored, wide = stored_between_nans(count, width, kind)
    h, y = rows_between_nans(count, seed=2), rows_between_nans(width, seed=3)
    expected = y + h.astype(np.float64) @ wide
    size = np.abs(y) + np.abs(h.astype(np.float64)) @ np.abs(wide)
    all_rows = compute_add(kind, h, ROWS, stored, y)
    assert (np.abs(all_rows - expected) <= 1e-6 * size).all()
    for rows in range(1, ROWS):
        assert np.array_equal(compute_add(kind, h, rows, stored, y), all_rows[:rows])
