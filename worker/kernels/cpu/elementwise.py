"""Norms, the MLP's gate and the likeliest token, row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from worker.kernels.cpu.numbers import COMPILED, exp_negative


@njit(**COMPILED)
def _norm_row(x: Any, weight: Any, eps: Any, out: Any) -> None:
    total = np.float32(0)
    for k in range(len(x)):
        total += x[k] * x[k]
    factor = np.float32(1) / np.sqrt(total / np.float32(len(x)) + eps)
    for k in range(len(x)):
        out[k] = weight[k] * (x[k] * factor)


@njit(**COMPILED)
def rms_norm(x: Any, weight: Any, eps: Any, out: Any, row: int) -> None:
    """Write weight · x / sqrt(mean(x²) + eps) of one row. x, out [T, D] float32; weight [D] float32."""
    _norm_row(x[row], weight, eps, out[row])


@njit(**COMPILED)
def add(residual: Any, delta: Any, row: int) -> None:
    """Add a row of delta to residual in place. residual, delta [T, D] float32."""
    r, d = residual[row], delta[row]
    for k in range(len(r)):
        r[k] += d[k]


@njit(**COMPILED)
def silu_mul(gate_up: Any, out: Any, row: int) -> None:
    """Write silu(gate) · up of one row. gate_up [T, 2·inner], out [T, inner], float32."""
    inner = out.shape[1]
    gate, up, to = gate_up[row, :inner], gate_up[row, inner:], out[row]
    for k in range(inner):
        g = gate[k]
        e = exp_negative(-abs(g))  # sigmoid from the side that cannot overflow
        sigmoid = (np.float32(1) if g >= np.float32(0) else e) / (np.float32(1) + e)
        to[k] = g * sigmoid * up[k]


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
