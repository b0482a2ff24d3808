"""Parts of a packed module: groups of rank rows in one number format, and what their numbers stand for.

`dequantize` is the oracle of every kernel that reads a part. Knows nothing of files or of how values were chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

FORMAT_NONE: Final = "none"
FORMAT_INT8: Final = "int8"
FORMAT_INT4: Final = "int4"
FORMATS: Final = (FORMAT_NONE, FORMAT_INT8, FORMAT_INT4)

GROUP: Final = 64
"""Values along a row that share an int4 scale."""
MULTIPLE: Final = 16
"""Quantized rows have a multiple of this many values."""


@dataclass(frozen=True, slots=True)
class PackedPart:
    """`rank` rows of a LoRA, y += B(Ax), in one number format. Arrays are read-only views of the mapped file.

    none: `a` [rank, in] and `b` [out, rank] in `dtype` ("F32", "F16", "BF16" as uint16 bits); `scale` is a factor of
    the product.
    int8: `a` [rank, in] and `b` [rank, out], so B transposed, in -127..127; `scale` [rank] float32, with alpha/r in it.
    int4: `a` [rank, in/2] and `b` [rank, out/2] uint8, two values a byte (see `unpack_int4`); `a_scale`
    [rank, ceil(in/64)] and `b_scale` [rank, ceil(out/64)] float16 or float32, with alpha/r in one of them; `scale` 1.
    """

    format: Literal["none", "int8", "int4"]
    rank: int
    scale: float | NDArray[np.float32]
    dtype: str
    a: NDArray[Any]
    b: NDArray[Any]
    a_scale: NDArray[Any] | None = None
    b_scale: NDArray[Any] | None = None

    @property
    def in_features(self) -> int:
        """Values in a row of A."""
        return int(self.a.shape[1]) * (2 if self.format == FORMAT_INT4 else 1)

    @property
    def out_features(self) -> int:
        """Values in a row of B transposed."""
        if self.format == FORMAT_NONE:
            return int(self.b.shape[0])
        return int(self.b.shape[1]) * (2 if self.format == FORMAT_INT4 else 1)


def dequantize(part: PackedPart) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return float32 A [rank, in] and B [out, rank] with every scale folded in, so that the part's weight is B @ A."""
    if part.format == FORMAT_NONE:
        return widen(part.a, part.dtype), widen(part.b, part.dtype) * np.float32(part.scale)
    if part.a_scale is None or part.b_scale is None:
        return part.a.astype(np.float32), part.b.T * np.asarray(part.scale, np.float32)
    a = unpack_int4(part.a) * spread(part.a_scale, part.in_features)
    b = unpack_int4(part.b) * spread(part.b_scale, part.out_features)
    return a, np.ascontiguousarray(b.T)


def widen(array: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Return a stored factor as float32; BF16 comes as uint16 bits."""
    if dtype == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def bfloat16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return float32 values as bfloat16, rounded to nearest even; bits, as numpy lacks the dtype. Any NaN is 0x7FC0."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded.astype(np.uint16))


def spread(scales: NDArray[Any], num_values: int) -> NDArray[np.float32]:
    """Repeat a scale for each value of its group: [..., groups] -> float32 [..., num_values]."""
    return np.repeat(scales.astype(np.float32), GROUP, axis=-1)[..., :num_values]


def pack_int4(values: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Pack rows of values in -8..7, [..., n] -> [..., n/2]; n is even.

    A nibble is its value + 8. Within a group of L values (64; the last of a row may have fewer) byte j holds value j in
    its low nibble and value L/2 + j in its high one.
    """
    nibbles = (values + np.int8(8)).view(np.uint8)
    num_whole = values.shape[-1] // GROUP * GROUP
    whole = nibbles[..., :num_whole].reshape(*values.shape[:-1], -1, 2, GROUP // 2)
    packed = (whole[..., 0, :] | (whole[..., 1, :] << 4)).reshape(*values.shape[:-1], -1)
    rest = nibbles[..., num_whole:]
    half = rest.shape[-1] // 2
    return np.concatenate([packed, rest[..., :half] | (rest[..., half:] << 4)], axis=-1)


def unpack_int4(packed: NDArray[np.uint8]) -> NDArray[np.int8]:
    """Return the values, -8..7, of packed rows: [..., n/2] -> [..., n]."""
    num_whole = packed.shape[-1] // (GROUP // 2) * (GROUP // 2)
    whole = packed[..., :num_whole].reshape(*packed.shape[:-1], -1, 1, GROUP // 2)
    values = np.concatenate([whole & 15, whole >> 4], axis=-2).reshape(*packed.shape[:-1], -1)
    rest = packed[..., num_whole:]
    return np.concatenate([values, rest & 15, rest >> 4], axis=-1).view(np.int8) - np.int8(8)


def num_groups(num_values: int) -> int:
    """Return how many int4 scales a row has."""
    return -(-num_values // GROUP)
