"""Rounding rows of numbers to int8 and int4, many modules of one shape at a time. Knows nothing of adapters.

Shapes: M modules, R rank rows, L values a row. The int4 rounding minimises the error of the product that the rows are a
factor of: what is lost in one rank row is made good in the rows that are still to be rounded, as far as the Gram
matrix of the other factor says that they can (Babai's nearest plane, known from GPTQ, here across rank rows).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from common.adapter_format.parts import GROUP, num_groups, spread

INT8_MAX: Final = 127
INT4_MIN, INT4_MAX = -8, 7

_Floats = NDArray[np.floating[Any]]
# Scales tried for a group, as fractions of the one that just holds its largest value at 8.
_CLIP_RATIOS: Final = (1.2, 1.1, 1.03, 0.97, 0.91, 0.85, 0.79, 0.73, 0.66, 0.58)
_DAMPING: Final = 1e-3  # of the diagonal: keeps what cannot be made good from growing
_LEAST_SIZE: Final = 2.0**-6
_BLOCK: Final = 16
_MAX_FEEDBACK_ROWS: Final = 512  # beyond, the time would not be worth it


def binary_exponents(rows: _Floats) -> NDArray[np.int64]:
    """Return e [M, R] with 2^e <= max |row| < 2^(e+1); 0 for rows of zeros."""
    return np.asarray(np.frexp(np.abs(rows).max(axis=-1).astype(np.float64))[1], np.int64) - 1


def round_int8(rows: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float64]]:
    """Return (values in -127..127 [M, R, L], scales [M, R]): symmetric, the largest of a row is 127."""
    largest = np.maximum(rows.max(axis=-1), -rows.min(axis=-1))
    to_steps = np.divide(INT8_MAX, largest, out=np.zeros_like(largest), where=largest > 0)
    steps = rows * to_steps[..., None]
    return np.rint(steps, out=steps).astype(np.int8), largest.astype(np.float64) / INT8_MAX


def int4_scales(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the scale of each group of 64 with the least squared error: [..., L] -> [..., ceil(L/64)]."""
    length, groups = rows.shape[-1], num_groups(rows.shape[-1])
    if length != groups * GROUP:
        padding = [(0, 0)] * (rows.ndim - 1) + [(0, groups * GROUP - length)]
        rows = np.pad(rows, padding)
    grouped = rows.reshape(*rows.shape[:-1], groups, GROUP)
    largest = np.abs(grouped).max(axis=-1)
    best = np.zeros(largest.shape, np.float32)
    least = np.full(largest.shape, np.inf, np.float32)
    for ratio in _CLIP_RATIOS:
        scale = largest * np.float32(ratio / -INT4_MIN)
        steps = grouped * np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)[..., None]
        rounded = np.rint(steps)
        np.clip(rounded, INT4_MIN, INT4_MAX, out=rounded)
        rounded -= steps
        error = np.einsum("...l,...l->...", rounded, rounded) * scale * scale
        better = error < least
        best[better], least[better] = scale[better], error[better]
    return best


def round_int4(rows: NDArray[np.float32], gram: NDArray[np.float64]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Return (values in -8..7 [M, R, L], scales [M, R, groups]), so that tr(dᵀ G d) of the error d is small.

    `gram` G [M, R, R] is the other factor's.
    """
    num_rows = rows.shape[1]
    values = np.empty(rows.shape, np.int8)
    scales = np.empty((*rows.shape[:2], num_groups(rows.shape[2])), np.float32)
    if num_rows == 1 or num_rows > _MAX_FEEDBACK_ROWS:
        for row in range(num_rows):
            scales[:, row] = int4_scales(rows[:, row])
            values[:, row] = _to_steps(rows[:, row], scales[:, row])[0]
        return values, scales
    order = np.argsort(-np.diagonal(gram, axis1=1, axis2=2), axis=1, kind="stable")  # what matters most, first
    feedback = _feedback(gram, order).astype(np.float32)
    left = np.take_along_axis(rows, order[..., None], axis=1)
    for start in range(0, num_rows, _BLOCK):
        stop = min(start + _BLOCK, num_rows)
        errors = np.empty((rows.shape[0], stop - start, rows.shape[2]), np.float32)
        for row in range(start, stop):
            target = left[:, row]
            scale = int4_scales(target)
            steps, error = _to_steps(target, scale)
            at = order[:, row]
            values[np.arange(len(rows)), at], scales[np.arange(len(rows)), at] = steps, scale
            errors[:, row - start] = error
            left[:, row + 1 : stop] -= feedback[:, row, row + 1 : stop, None] * error[:, None]
        left[:, stop:] -= np.swapaxes(feedback[:, start:stop, stop:], 1, 2) @ errors
    return values, scales


def _to_steps(rows: NDArray[np.float32], scales: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Round rows [..., L] with their groups' scales; returns the values and `rows` less what they stand for."""
    each = spread(scales, rows.shape[-1])
    steps = rows * np.divide(1, each, out=np.zeros_like(each), where=each > 0)
    np.clip(np.rint(steps, out=steps), INT4_MIN, INT4_MAX, out=steps)
    return steps.astype(np.int8), rows - steps * each


def _feedback(gram: NDArray[np.float64], order: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return F [M, R, R]: an error e in the row at place i is made good by taking F[i, j] e from each later row j.

    From the Cholesky factor of the inverse Gram matrix with its rows in `order`. Rows that matter far less than the
    largest take and give nothing: they would be blown up.
    """
    sorted_gram = np.take_along_axis(np.take_along_axis(gram, order[..., None], axis=1), order[:, None], axis=2)
    size = np.sqrt(np.diagonal(sorted_gram, axis1=1, axis2=2))
    counts = size > _LEAST_SIZE * size.max(axis=1, keepdims=True)
    size = np.where(counts, size, 1.0)
    unit = sorted_gram / (size[:, :, None] * size[:, None, :])  # so that the damping fits all sizes
    unit = np.where(counts[:, :, None] & counts[:, None, :], unit, 0) + np.eye(gram.shape[1]) * _DAMPING
    upper = np.swapaxes(np.linalg.cholesky(np.linalg.inv(unit)), 1, 2)
    upper /= np.diagonal(upper, axis1=1, axis2=2)[:, :, None].copy()
    return np.asarray(np.triu(upper, 1) * (size[:, :, None] / size[:, None, :]))
