"""y = x Wᵀ + b for few or many rows of x, the weight in float32 or in bfloat16 bits, arithmetic in float32.

Every form computes twelve sums at a time, of 4 rows and 3 outputs, 3 and 4, 2 and 6, or 1 and 12: twelve accumulators
fill a CPU's vector registers, and with equal pressure the compiler takes each sum in one and the same order. So a row's
result is bit for bit the same however many rows it is computed with; `tests/kernels` holds the compiler to it.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import njit

from worker.kernels.cpu.numbers import COMPILED, widen

TILE_SUMS: Final = 12
"""Sums computed together."""

LINEAR_OUTPUTS: Final = 48
"""Outputs of one task: their weights stay in the second cache while all rows of x pass by."""


@njit(**COMPILED)
def linear(x: Any, weight: Any, bias: Any, y: Any, task: int) -> None:
    """Write y[m, n] = Σₖ x[m, k] · weight[n, k] + bias[n] for a task's LINEAR_OUTPUTS outputs n.

    x [M, K] float32; weight [N, K] float32 or uint16 (bfloat16 bits); bias [N], y [M, N] float32.
    """
    # Tiles that would reach past the last output begin earlier: what others write too they write alike.
    first = task * LINEAR_OUTPUTS
    last = min(len(weight), first + LINEAR_OUTPUTS)
    if len(weight) < TILE_SUMS:
        _few_outputs(x, weight, bias, y)
        return
    row = 0
    while row + 4 <= len(x):
        _rows4(x, weight, bias, y, row, first, last)
        row += 4
    if len(x) - row == 3:
        _rows3(x, weight, bias, y, row, first, last)
    elif len(x) - row == 2:
        _rows2(x, weight, bias, y, row, first, last)
    elif len(x) - row == 1:
        _rows1(x, weight, bias, y, row, first, last)


@njit(**COMPILED)
def _rows4(x: Any, weight: Any, bias: Any, y: Any, row: int, first: int, last: int) -> None:
    x0 = x[row]
    x1 = x[row + 1]
    x2 = x[row + 2]
    x3 = x[row + 3]
    for start in range(first, last, 3):
        n = min(start, last - 3)
        w0 = weight[n]
        w1 = weight[n + 1]
        w2 = weight[n + 2]
        s0_0 = s0_1 = s0_2 = np.float32(0)
        s1_0 = s1_1 = s1_2 = np.float32(0)
        s2_0 = s2_1 = s2_2 = np.float32(0)
        s3_0 = s3_1 = s3_2 = np.float32(0)
        for k in range(len(x0)):
            v0 = widen(w0[k])
            v1 = widen(w1[k])
            v2 = widen(w2[k])
            u = x0[k]
            s0_0 += u * v0
            s0_1 += u * v1
            s0_2 += u * v2
            u = x1[k]
            s1_0 += u * v0
            s1_1 += u * v1
            s1_2 += u * v2
            u = x2[k]
            s2_0 += u * v0
            s2_1 += u * v1
            s2_2 += u * v2
            u = x3[k]
            s3_0 += u * v0
            s3_1 += u * v1
            s3_2 += u * v2
        y[row, n] = s0_0 + bias[n]
        y[row, n + 1] = s0_1 + bias[n + 1]
        y[row, n + 2] = s0_2 + bias[n + 2]
        y[row + 1, n] = s1_0 + bias[n]
        y[row + 1, n + 1] = s1_1 + bias[n + 1]
        y[row + 1, n + 2] = s1_2 + bias[n + 2]
        y[row + 2, n] = s2_0 + bias[n]
        y[row + 2, n + 1] = s2_1 + bias[n + 1]
        y[row + 2, n + 2] = s2_2 + bias[n + 2]
        y[row + 3, n] = s3_0 + bias[n]
        y[row + 3, n + 1] = s3_1 + bias[n + 1]
        y[row + 3, n + 2] = s3_2 + bias[n + 2]


@njit(**COMPILED)
def _rows3(x: Any, weight: Any, bias: Any, y: Any, row: int, first: int, last: int) -> None:
    x0 = x[row]
    x1 = x[row + 1]
    x2 = x[row + 2]
    for start in range(first, last, 4):
        n = min(start, last - 4)
        w0 = weight[n]
        w1 = weight[n + 1]
        w2 = weight[n + 2]
        w3 = weight[n + 3]
        s0_0 = s0_1 = s0_2 = s0_3 = np.float32(0)
        s1_0 = s1_1 = s1_2 = s1_3 = np.float32(0)
        s2_0 = s2_1 = s2_2 = s2_3 = np.float32(0)
        for k in range(len(x0)):
            v0 = widen(w0[k])
            v1 = widen(w1[k])
            v2 = widen(w2[k])
            v3 = widen(w3[k])
            u = x0[k]
            s0_0 += u * v0
            s0_1 += u * v1
            s0_2 += u * v2
            s0_3 += u * v3
            u = x1[k]
            s1_0 += u * v0
            s1_1 += u * v1
            s1_2 += u * v2
            s1_3 += u * v3
            u = x2[k]
            s2_0 += u * v0
            s2_1 += u * v1
            s2_2 += u * v2
            s2_3 += u * v3
        y[row, n] = s0_0 + bias[n]
        y[row, n + 1] = s0_1 + bias[n + 1]
        y[row, n + 2] = s0_2 + bias[n + 2]
        y[row, n + 3] = s0_3 + bias[n + 3]
        y[row + 1, n] = s1_0 + bias[n]
        y[row + 1, n + 1] = s1_1 + bias[n + 1]
        y[row + 1, n + 2] = s1_2 + bias[n + 2]
        y[row + 1, n + 3] = s1_3 + bias[n + 3]
        y[row + 2, n] = s2_0 + bias[n]
        y[row + 2, n + 1] = s2_1 + bias[n + 1]
        y[row + 2, n + 2] = s2_2 + bias[n + 2]
        y[row + 2, n + 3] = s2_3 + bias[n + 3]


@njit(**COMPILED)
def _rows2(x: Any, weight: Any, bias: Any, y: Any, row: int, first: int, last: int) -> None:
    x0 = x[row]
    x1 = x[row + 1]
    for start in range(first, last, 6):
        n = min(start, last - 6)
        w0 = weight[n]
        w1 = weight[n + 1]
        w2 = weight[n + 2]
        w3 = weight[n + 3]
        w4 = weight[n + 4]
        w5 = weight[n + 5]
        s0_0 = s0_1 = s0_2 = s0_3 = s0_4 = s0_5 = np.float32(0)
        s1_0 = s1_1 = s1_2 = s1_3 = s1_4 = s1_5 = np.float32(0)
        for k in range(len(x0)):
            v0 = widen(w0[k])
            v1 = widen(w1[k])
            v2 = widen(w2[k])
            v3 = widen(w3[k])
            v4 = widen(w4[k])
            v5 = widen(w5[k])
            u = x0[k]
            s0_0 += u * v0
            s0_1 += u * v1
            s0_2 += u * v2
            s0_3 += u * v3
            s0_4 += u * v4
            s0_5 += u * v5
            u = x1[k]
            s1_0 += u * v0
            s1_1 += u * v1
            s1_2 += u * v2
            s1_3 += u * v3
            s1_4 += u * v4
            s1_5 += u * v5
        y[row, n] = s0_0 + bias[n]
        y[row, n + 1] = s0_1 + bias[n + 1]
        y[row, n + 2] = s0_2 + bias[n + 2]
        y[row, n + 3] = s0_3 + bias[n + 3]
        y[row, n + 4] = s0_4 + bias[n + 4]
        y[row, n + 5] = s0_5 + bias[n + 5]
        y[row + 1, n] = s1_0 + bias[n]
        y[row + 1, n + 1] = s1_1 + bias[n + 1]
        y[row + 1, n + 2] = s1_2 + bias[n + 2]
        y[row + 1, n + 3] = s1_3 + bias[n + 3]
        y[row + 1, n + 4] = s1_4 + bias[n + 4]
        y[row + 1, n + 5] = s1_5 + bias[n + 5]


@njit(**COMPILED)
def _rows1(x: Any, weight: Any, bias: Any, y: Any, row: int, first: int, last: int) -> None:
    x0 = x[row]
    for start in range(first, last, 12):
        n = min(start, last - 12)
        w0 = weight[n]
        w1 = weight[n + 1]
        w2 = weight[n + 2]
        w3 = weight[n + 3]
        w4 = weight[n + 4]
        w5 = weight[n + 5]
        w6 = weight[n + 6]
        w7 = weight[n + 7]
        w8 = weight[n + 8]
        w9 = weight[n + 9]
        w10 = weight[n + 10]
        w11 = weight[n + 11]
        s0_0 = s0_1 = s0_2 = s0_3 = s0_4 = s0_5 = s0_6 = s0_7 = s0_8 = s0_9 = s0_10 = s0_11 = np.float32(0)
        for k in range(len(x0)):
            v0 = widen(w0[k])
            v1 = widen(w1[k])
            v2 = widen(w2[k])
            v3 = widen(w3[k])
            v4 = widen(w4[k])
            v5 = widen(w5[k])
            v6 = widen(w6[k])
            v7 = widen(w7[k])
            v8 = widen(w8[k])
            v9 = widen(w9[k])
            v10 = widen(w10[k])
            v11 = widen(w11[k])
            u = x0[k]
            s0_0 += u * v0
            s0_1 += u * v1
            s0_2 += u * v2
            s0_3 += u * v3
            s0_4 += u * v4
            s0_5 += u * v5
            s0_6 += u * v6
            s0_7 += u * v7
            s0_8 += u * v8
            s0_9 += u * v9
            s0_10 += u * v10
            s0_11 += u * v11
        y[row, n] = s0_0 + bias[n]
        y[row, n + 1] = s0_1 + bias[n + 1]
        y[row, n + 2] = s0_2 + bias[n + 2]
        y[row, n + 3] = s0_3 + bias[n + 3]
        y[row, n + 4] = s0_4 + bias[n + 4]
        y[row, n + 5] = s0_5 + bias[n + 5]
        y[row, n + 6] = s0_6 + bias[n + 6]
        y[row, n + 7] = s0_7 + bias[n + 7]
        y[row, n + 8] = s0_8 + bias[n + 8]
        y[row, n + 9] = s0_9 + bias[n + 9]
        y[row, n + 10] = s0_10 + bias[n + 10]
        y[row, n + 11] = s0_11 + bias[n + 11]


@njit(**COMPILED)
def _few_outputs(x: Any, weight: Any, bias: Any, y: Any) -> None:
    for m in range(len(x)):
        for n in range(len(weight)):
            u, w = x[m], weight[n]
            s = np.float32(0)
            for k in range(len(u)):
                s += u[k] * widen(w[k])
            y[m, n] = s + bias[n]
