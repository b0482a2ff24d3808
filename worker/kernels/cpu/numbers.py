"""Number formats in compiled code: how a stored value becomes the float32 that is computed with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numba import types
from numba.extending import overload, register_jitable

COMPILED: Final[dict[str, Any]] = {
    "fastmath": {"reassoc", "contract", "arcp", "nsz", "afn"},
    "error_model": "numpy",
    "cache": True,
}
"""How everything here is compiled. Sums may be taken in any order, so that they can be vectorized; values need not be
finite: a broken adapter's NaN has to arrive where it is looked for, and divisions by zero raise nothing."""

_LOG2E: Final = np.float32(1.44269504088896341)
_LN2_HIGH: Final = np.float32(0.693359375)
_LN2_LOW: Final = np.float32(-2.12194440e-4)
_HALF_BIAS: Final = np.float32(2.0**112)
_SMALLEST: Final = np.float32(-87.3)


def widen(value: Any) -> np.float32:
    """Return a stored weight as float32: uint16 holds a bfloat16's bits, int16 a float16's, int8 a whole number."""
    raise NotImplementedError("for compiled code only")


@overload(widen, inline="always", strict=False)
def _widen(value: Any) -> Callable[[Any], Any] | None:
    if value == types.uint16:
        return lambda value: np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)
    if value == types.int16:
        return _widen_half
    if value == types.float32:
        return lambda value: value
    if isinstance(value, types.Integer):
        return lambda value: np.float32(value)  # noqa: PLW0108 - compiled by its source
    return None


def _widen_half(value: Any) -> Any:
    # The exponent's bias is made up for by a product, which is exact, subnormal numbers included.
    bits = np.uint32(np.uint16(value))
    moved = ((bits & np.uint32(0x7FFF)) << np.uint32(13)) | ((bits & np.uint32(0x8000)) << np.uint32(16))
    return np.uint32(moved).view(np.float32) * _HALF_BIAS


@register_jitable(inline="always")
def exp_negative(x: Any) -> Any:
    """Return exp(x) of a float32 x ≤ 0 within 3 ulp, 0 below -87.3, NaN for NaN.

    In plain arithmetic, so that loops over it are vectorized: the mathematical library's takes one value at a time.
    Cody and Waite's reduction, the polynomial of Cephes' expf.
    """
    clamped = max(x, _SMALLEST)
    n = np.float32(np.floor(clamped * _LOG2E + np.float32(0.5)))
    r = clamped - n * _LN2_HIGH - n * _LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1)
    power = np.int32(np.int32(n) + np.int32(127)) << np.int32(23)
    scaled = p * np.int32(power).view(np.float32)
    return np.float32(0) if x <= _SMALLEST else scaled + (x - x)  # NaN stays NaN
