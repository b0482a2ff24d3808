"""Rank rows that an int8 module gets beside its own where rounding them to 8 bits alone would lose too much.

A row's step is set by its largest value, and nothing but its scale can be chosen: clipping costs more than a finer step
gains, and the best of many scales is some 2 % better than the simplest. So a row with an outlier, or a module of one
or two rows that happen to be wide, loses more than others do. One more rank row mends it: what rounding a row of one
factor has lost, rounded anew with a step of its own, beside the stored row of the other factor. What is left of that
row's error is then the other factor's. A module that GPUs would compute without corrections gets no more of them than
they compute, so that the largest lose what rounding loses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from common.adapter_format.factors import Factors, relative_errors
from common.adapter_format.rounding import round_int8

INT8_ERROR: Final = 0.012
"""Relative error of a module's weight above which it gets corrections, while it may have more."""
_ROWS_PER_CORRECTION: Final = 16
# Rows as long as a vocabulary have larger largest values, so that all of them lose more.
_LONG_ROW: Final = 2**15
_LONG_ROWS_PER_CORRECTION: Final = 4
_LEAST_STEP: Final = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True)
class Rounded:
    """A module's rank rows in int8, and what they stand for: rows of A and Bᵀ times their steps, and times weights."""

    a: NDArray[np.int8]
    b: NDArray[np.int8]
    a_steps: NDArray[np.float64]
    b_steps: NDArray[np.float64]
    weights: NDArray[np.float64]


def max_corrections(rank: int, longest_row: int = 0, most_rows: int | None = None) -> int:
    """Return how many rank rows a module of `rank`, with rows of so many values at most, may get in addition.

    With them it has no more than `most_rows`, unless it has without.
    """
    num = max(1, rank // (_ROWS_PER_CORRECTION if longest_row < _LONG_ROW else _LONG_ROWS_PER_CORRECTION))
    return num if most_rows is None or rank > most_rows else min(num, most_rows - rank)


def corrected(
    rounded: Rounded, factors: Factors, off: Factors, error: float, most_rows: int | None = None
) -> tuple[Rounded, float]:
    """Return the module with as many corrections as it needs and may have, and its relative error then.

    `factors` and `off` (stored less exact) are of this module alone, [1, R, L]; `error` is what `rounded` loses. Of
    `most_rows` see `max_corrections`.
    """
    rank = len(rounded.weights)
    exact = {"a": factors.a[0], "b": factors.b[0]}
    lost = {"a": off.a[0].copy(), "b": off.b[0].copy()}
    other = {"a": "b", "b": "a"}
    for _ in range(max_corrections(rank, max(factors.a.shape[2], factors.b.shape[2]), most_rows)):
        if error <= INT8_ERROR:
            break
        sizes = {f: rounded.weights[:rank] * _norms(lost[f]) * _norms(exact[other[f]]) for f in "ab"}
        worse = max("ab", key=lambda f: float(sizes[f].max()))
        row = int(np.argmax(sizes[worse]))
        values, steps = round_int8(-lost[worse][None, row : row + 1])
        more = _with_row(rounded, row, worse, values[0], float(steps[0, 0]))
        if (more.a_steps[-1] * more.b_steps[-1] * more.weights[-1]) < _LEAST_STEP:
            break
        lost[worse][row] += (values[0, 0] * np.float32(steps[0, 0])).astype(lost[worse].dtype)
        now = relative_errors(factors, Factors(lost["a"][None], lost["b"][None]), rounded.weights[None, :rank])
        if now[0] >= error:
            break
        rounded, error = more, float(now[0])
    return rounded, error


def _with_row(rounded: Rounded, row: int, factor: str, values: NDArray[np.int8], step: float) -> Rounded:
    """Add a rank row: `values` for one factor, the stored row of the other."""
    a, b = (values, rounded.b[row : row + 1]) if factor == "a" else (rounded.a[row : row + 1], values)
    a_step, b_step = (step, rounded.b_steps[row]) if factor == "a" else (rounded.a_steps[row], step)
    return Rounded(
        np.concatenate([rounded.a, a]),
        np.concatenate([rounded.b, b]),
        np.append(rounded.a_steps, a_step),
        np.append(rounded.b_steps, b_step),
        np.append(rounded.weights, rounded.weights[row]),
    )


def _norms(rows: NDArray[Any]) -> NDArray[np.float64]:
    return np.asarray(np.sqrt(np.einsum("rl,rl->r", rows, rows, dtype=np.float64)))
