"""The largest of many numbers, and where it is."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from worker.kernels.cpu.numbers import COMPILED


@njit(**COMPILED)
def ordered_top(numbers: Any) -> Any:
    """Return the largest of float32 numbers, NaN if there is one.

    By the numbers' bits, as comparisons of whole numbers are what compilers vectorize: with a negative number's other
    bits turned over, they order as the numbers do.
    """
    bits = numbers.view(np.int32)
    top, size = np.int32(-(2**31)), np.int32(0)
    for k in range(len(bits)):
        top = max(top, bits[k] ^ ((bits[k] >> np.int32(31)) & np.int32(0x7FFFFFFF)))
        size = max(size, bits[k] & np.int32(0x7FFFFFFF))
    value = np.int32(top ^ ((top >> np.int32(31)) & np.int32(0x7FFFFFFF))).view(np.float32)
    return np.float32(np.nan) if size > np.int32(0x7F800000) else value


@njit(**COMPILED)
def largest(x: Any, values: Any, places: Any, row: int) -> None:
    """Write a row's largest number and where it first is; NaN, at a place without meaning, if there is one.

    x [T, N] float32; values [T] float32; places [T] int64.
    """
    numbers = x[row]
    value = ordered_top(numbers)
    at = 0
    while at < len(numbers) - 1 and numbers[at] != value:  # of two zeros the first, whatever their signs
        at += 1
    values[row], places[row] = value, at
