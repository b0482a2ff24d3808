"""The factors of many modules of one shape, stacked, and what quantizing them costs: bases of their product, errors.

M modules, R rank rows: `a` [M, R, in] and `b` [M, R, out] (B transposed), so that a module's weight is b[m].T @ a[m].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class Factors:
    """Stacked factors of modules of one shape; any float dtype."""

    a: Floats
    b: Floats


def gram(rows: Floats) -> NDArray[np.float64]:
    """Return rows @ rowsᵀ of each module, in float64: [M, R, L] -> [M, R, R]."""
    wide = rows.astype(np.float64, copy=False)
    return np.asarray(wide @ np.swapaxes(wide, 1, 2))


def relative_errors(factors: Factors, off: Factors, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ‖bᵀWa - b̂ᵀWâ‖ / ‖bᵀWa‖ (Frobenius) of each module, [M]; 0 where both are nothing, inf where only bᵀWa is.

    â = a + `off.a`, b̂ = b + `off.b`, and W is diagonal with `weights` [M, R]. Exact, without forming the products: the
    difference is b̂ᵀ W off.a + off.bᵀ W a, whose norm follows from R x R Gram matrices, and neither term subtracts
    nearly equal numbers. Only the ratios of a module's weights count, so that none is too small for its square.
    """
    exponents = np.frexp(np.abs(weights).max(axis=1, keepdims=True))[1]
    weights = np.ldexp(weights, -exponents)
    left = np.concatenate([factors.b + off.b, off.b], axis=1)
    right = np.concatenate([off.a, factors.a], axis=1)
    twice = np.concatenate([weights, weights], axis=1)
    lost = np.maximum((_weighed(gram(left), twice) * gram(right)).sum(axis=(1, 2)), 0)
    whole = np.maximum((_weighed(gram(factors.b), weights) * gram(factors.a)).sum(axis=(1, 2)), 0)
    ratios = np.divide(lost, whole, out=np.where(lost > 0, np.inf, 0.0), where=whole > 0)
    return np.asarray(np.sqrt(ratios))


def _weighed(matrix: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    return matrix * (weights[:, :, None] * weights[:, None, :])


def principal(factors: Factors) -> Factors:
    """Return the same products with their singular vectors as rows, falling, each half of the singular value."""
    q_a, r_a = np.linalg.qr(np.swapaxes(factors.a, 1, 2).astype(np.float64, copy=False))
    q_b, r_b = np.linalg.qr(np.swapaxes(factors.b, 1, 2).astype(np.float64, copy=False))
    u, sizes, vt = np.linalg.svd(r_b @ np.swapaxes(r_a, 1, 2))
    roots = np.sqrt(sizes)[..., None]
    return Factors((roots * vt) @ np.swapaxes(q_a, 1, 2), roots * np.swapaxes(q_b @ u, 1, 2))


def mixed(factors: Factors, start: int) -> Factors:
    """Return the same products with the rows from `start` on turned into each other by a cosine transform.

    Rows of one size, which all depend on each other, lose least by the rounding of `round_int4`: singular vectors on
    their own leave it nothing to make good.
    """
    size = factors.a.shape[1] - start
    turn = np.cos(np.pi / size * (np.arange(size) + 0.5) * np.arange(size)[:, None]) * np.sqrt(2 / size)
    turn[0] /= np.sqrt(2)
    return Factors(*(np.concatenate([r[:, :start], turn @ r[:, start:]], axis=1) for r in (factors.a, factors.b)))
