"""Norms and the MLP's gate, row by row; a task computes several neighbouring rows."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import njit
from numba.extending import register_jitable

from worker.kernels.cpu.numbers import COMPILED, exp_negative

_TASK_NUMBERS: Final = 4096
"""Numbers of a task's rows: that two threads share tasks out costs each of them as much as some thousand numbers."""


@register_jitable
def rows_at_once(columns: int) -> int:
    """Return how many rows of so many numbers a task computes."""
    return max(1, _TASK_NUMBERS // columns)


@njit(**COMPILED)
def _norm_row(x: Any, weight: Any, eps: Any, out: Any) -> None:
    total = np.float32(0)
    for k in range(len(x)):
        total += x[k] * x[k]
    factor = np.float32(1) / np.sqrt(total / np.float32(len(x)) + eps)
    for k in range(len(x)):
        out[k] = weight[k] * (x[k] * factor)


@njit(**COMPILED)
def rms_norm(x: Any, weight: Any, eps: Any, out: Any, first: int, end: int) -> None:
    """Write weight · x / sqrt(mean(x²) + eps) of rows first … end - 1. x, out [T, D] float32; weight [D] float32."""
    for row in range(first, end):
        _norm_row(x[row], weight, eps, out[row])


@njit(**COMPILED)
def add_rms_norm(residual: Any, delta: Any, weight: Any, eps: Any, out: Any, first: int, end: int) -> None:
    """Do `add`, then `rms_norm` of the residual."""
    for row in range(first, end):
        _add_row(residual[row], delta[row])
        _norm_row(residual[row], weight, eps, out[row])


@njit(**COMPILED)
def _add_row(residual: Any, delta: Any) -> None:
    for k in range(len(residual)):
        residual[k] += delta[k]


@njit(**COMPILED)
def add(residual: Any, delta: Any, first: int, end: int) -> None:
    """Add rows first … end - 1 of delta to residual in place. residual, delta [T, D] float32."""
    for row in range(first, end):
        _add_row(residual[row], delta[row])


@njit(**COMPILED)
def silu_mul(gate_up: Any, out: Any, first: int, end: int) -> None:
    """Write silu(gate) · up of rows first … end - 1. gate_up [T, 2·inner], out [T, inner], float32."""
    inner = out.shape[1]
    for row in range(first, end):
        _silu_mul_row(gate_up[row, :inner], gate_up[row, inner:], out[row])


@njit(**COMPILED)
def _silu_mul_row(gate: Any, up: Any, out: Any) -> None:
    for k in range(len(out)):
        g = gate[k]
        e = exp_negative(-abs(g))  # sigmoid from the side that cannot overflow
        sigmoid = (np.float32(1) if g >= np.float32(0) else e) / (np.float32(1) + e)
        out[k] = g * sigmoid * up[k]
