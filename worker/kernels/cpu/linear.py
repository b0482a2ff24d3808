"""y = x Wᵀ + b for few or many rows of x, the weight in float32, bits of bfloat16 or INT8, arithmetic in float32.

Rows are computed some at a time, as many as the processor's registers hold the sums of (`panels`); a result's bits do
not depend on that.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from numba import carray, njit, types
from torch import Tensor

from worker.kernels.cpu.atomics import address
from worker.kernels.cpu.numbers import COMPILED, widen
from worker.kernels.cpu.panels import FORMS, PANEL_OUTPUTS, PANELS, panel_product
from worker.kernels.linear import Linear
from worker.kernels.tiles import Format

_KINDS: Final = {
    torch.float32: int(Format.FLOAT32),
    torch.bfloat16: int(Format.BFLOAT16),
    torch.int8: int(Format.INT8),
}
_FLOAT32, _BFLOAT16, _INT8 = _KINDS.values()  # compiled code knows plain numbers only

_EVEN_TASKS: Final = 32
"""Tasks that a few threads share evenly enough; larger ones, which are handed out more cheaply, from there on."""
_MOST_PAIRS: Final = 4
"""Of panels in a task: what their weights take stays in the second cache while all rows pass by."""


def pack_linear(linear: Linear) -> Linear:
    """Return a plain layer with its weight in panels, [panels, in, PANEL_OUTPUTS], filled up with zeros to whole ones.

    Bias and scales come in float32 and as long as the panels have outputs.
    """
    rounded = PANELS * PANEL_OUTPUTS
    outputs = -(-linear.out_features // rounded) * rounded
    weight = _padded(linear.weight, outputs).view(outputs // PANEL_OUTPUTS, PANEL_OUTPUTS, linear.in_features)
    packed = weight.transpose(1, 2).contiguous()
    bias = torch.zeros(outputs) if linear.bias is None else _padded(linear.bias.float(), outputs)
    scales = None if linear.scales is None else _padded(linear.scales, outputs)
    return Linear(linear.out_features, linear.in_features, packed, bias, scales)


def packed_kind(linear: Linear) -> int:
    """Return how a packed layer's weight is stored, by the code of its Format."""
    return _KINDS[linear.weight.dtype]


def panels_per_task(outputs: int) -> int:
    """Return how many panels one task computes: enough tasks to share them evenly, and few enough to hand out."""
    panels = -(-outputs // PANEL_OUTPUTS)
    return PANELS * max(1, min(_MOST_PAIRS, panels // (_EVEN_TASKS * PANELS)))


def _padded(values: Tensor, length: int) -> Tensor:
    return torch.cat([values, values.new_zeros(length - len(values), *values.shape[1:])])


def product_for(stored: Any, size: int, forms: tuple[int, ...] = FORMS) -> Any:
    """Return the function that computes a task with a weight stored as `stored`, of `size` bytes."""
    form = panel_product(stored, forms)
    most_rows = len(forms)

    @njit(**COMPILED)
    def product(
        x: int,
        rows: int,
        inner: int,
        weight: int,
        outputs: int,
        scales: int,
        bias: int,
        y: int,
        per_task: int,
        task: int,
    ) -> None:
        first = task * per_task
        panels = min(per_task, (outputs + PANELS * PANEL_OUTPUTS - 1) // (PANELS * PANEL_OUTPUTS) * PANELS - first)
        w, b, s = (
            weight + first * inner * PANEL_OUTPUTS * size,
            bias + first * PANEL_OUTPUTS * 4,
            scales + first * PANEL_OUTPUTS * 4,
        )
        groups = (rows + most_rows - 1) // most_rows
        row = 0
        for group in range(groups):
            count = (rows - row) // (groups - group)
            to = y + (row * outputs + first * PANEL_OUTPUTS) * 4
            form(
                count, x + row * inner * 4, inner, w, panels, inner, s, b, to, outputs, outputs - first * PANEL_OUTPUTS
            )
            row += count

    return product


_float32 = product_for(types.float32, np.dtype(np.float32).itemsize)
_bfloat16 = product_for(types.uint16, np.dtype(np.uint16).itemsize)
_int8 = product_for(types.int8, np.dtype(np.int8).itemsize)


@njit(**COMPILED)
def linear(
    kind: int,
    x: int,
    rows: int,
    inner: int,
    weight: int,
    outputs: int,
    scales: int,
    bias: int,
    y: int,
    per_task: int,
    task: int,
) -> None:
    """Write y = x Wᵀ + b for the outputs of a task's `per_task` panels.

    Addresses of x [rows, inner] and y [rows, outputs], float32, and of a packed layer's parts, its weight stored as
    `kind`.
    """
    if kind == _BFLOAT16:
        _bfloat16(x, rows, inner, weight, outputs, scales, bias, y, per_task, task)
    elif kind == _FLOAT32:
        _float32(x, rows, inner, weight, outputs, scales, bias, y, per_task, task)
    else:
        _int8(x, rows, inner, weight, outputs, scales, bias, y, per_task, task)


@njit(**COMPILED)
def embed(kind: int, weight: int, inner: int, scales: int, rows: Any, out: Any, row: int) -> None:
    """Write one row of a packed layer's weight W to `out` [R, inner] float32: that of `rows` [R] int64 at `row`."""
    number = rows[row]
    first, count = number // PANEL_OUTPUTS * inner * PANEL_OUTPUTS + number % PANEL_OUTPUTS, inner * PANEL_OUTPUTS
    if kind == _BFLOAT16:
        _strided(carray(address(weight + 2 * first), (count,), np.uint16), out[row])
    elif kind == _FLOAT32:
        _strided(carray(address(weight + 4 * first), (count,), np.float32), out[row])
    else:
        _strided(carray(address(weight + first), (count,), np.int8), out[row])
        scale = carray(address(scales + 4 * number), (1,), np.float32)[0]
        for k in range(inner):
            out[row, k] *= scale


@njit(**COMPILED)
def _strided(column: Any, out: Any) -> None:
    for k in range(len(out)):
        out[k] = widen(column[k * PANEL_OUTPUTS])
