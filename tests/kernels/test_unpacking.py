"""Unpacked formats, number by number: all of float16, and nibbles at every count."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit
from numpy.typing import NDArray

from worker.kernels.cpu.unpacking import unpack_halves, unpack_nibbles


@njit
def halves(stored: int, count: int, out: int) -> None:
    unpack_halves(stored, count, out)


@njit
def nibbles(stored: int, half: int, scale: np.float32, out: int) -> None:
    unpack_nibbles(stored, half, scale, out)


def room(count: int) -> NDArray[np.float32]:
    return np.full(count + 8, np.inf, np.float32)


def test_every_float16_is_itself_as_float32() -> None:
    stored = np.arange(2**16, dtype=np.uint16).view(np.float16)
    out = room(len(stored))
    halves(stored.ctypes.data, len(stored), out.ctypes.data)
    finite = ~np.isnan(stored)
    assert np.array_equal(np.isnan(out[:-8]), ~finite)
    assert np.array_equal(out[:-8][finite].view(np.int32), stored[finite].astype(np.float32).view(np.int32))


@pytest.mark.parametrize("count", [1, 7, 8, 21])
def test_float16_to_the_last_and_no_further(count: int) -> None:
    stored = np.random.default_rng(0).standard_normal(count).astype(np.float16)
    out = room(count)
    halves(stored.ctypes.data, count, out.ctypes.data)
    assert np.array_equal(out[:count], stored.astype(np.float32))
    assert (out[count:] == np.inf).all()


@pytest.mark.parametrize("half", [1, 5, 8, 13, 32])
def test_nibbles_to_the_last_and_no_further(half: int) -> None:
    stored = np.random.default_rng(half).integers(0, 256, half, dtype=np.uint8)
    out = room(2 * half)
    nibbles(stored.ctypes.data, half, np.float32(0.25), out.ctypes.data)
    expected = np.concatenate([stored & 15, stored >> 4]).astype(np.float32) - 8
    assert np.array_equal(out[: 2 * half], expected * np.float32(0.25))
    assert (out[2 * half :] == np.inf).all()
