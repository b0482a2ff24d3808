"""The layout of quantized parts: where each number lies, and what it stands for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.adapter_format.parts import PackedPart, dequantize, pack_int4, unpack_int4


def plain_unpack(packed: np.ndarray) -> list[int]:
    """One row, byte by byte, as the format is described."""
    values: list[int] = []
    at = 0
    while at < len(packed):
        half = min(32, len(packed) - at)
        row = [int(byte) for byte in packed[at : at + half]]
        values += [byte % 16 - 8 for byte in row] + [byte // 16 - 8 for byte in row]
        at += half
    return values


@given(st.integers(1, 3), st.integers(1, 20).map(lambda n: 16 * n), st.integers(0, 2**32))
def test_nibbles_lie_where_the_format_says(rank, width, seed):
    values = np.random.default_rng(seed).integers(-8, 8, (rank, width)).astype(np.int8)
    packed = pack_int4(values)
    assert packed.shape == (rank, width // 2)
    assert packed.dtype == np.uint8
    assert [plain_unpack(row) for row in packed] == values.tolist()
    assert np.array_equal(unpack_int4(packed), values)


def test_a_byte_holds_a_value_and_the_one_half_a_group_later():
    values = np.zeros((1, 80), np.int8)
    values[0, [0, 32, 64, 72]] = [-8, 7, 3, -1]
    packed = pack_int4(values)
    assert packed[0, 0] == (15 << 4) | 0  # values 0 and 32 of the whole group
    assert packed[0, 32] == (7 << 4) | 11  # values 64 and 72: the last group has 16
    assert packed[0, 1] == (8 << 4) | 8


def test_int8_rows_stand_for_value_times_scale():
    a, b = np.array([[2, -3]], np.int8), np.array([[5, 7, -127]], np.int8)
    part = PackedPart("int8", 1, np.array([0.5], np.float32), "I8", a, b)
    assert (part.in_features, part.out_features) == (2, 3)
    left, right = dequantize(part)
    assert (left.shape, right.shape) == ((1, 2), (3, 1))
    assert (right @ left).tolist() == [[5.0, -7.5], [7.0, -10.5], [-127.0, 190.5]]


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_int4_groups_have_their_own_scales(dtype):
    a, b = np.full((1, 80), 3, np.int8), np.full((1, 16), -2, np.int8)
    part = PackedPart(
        "int4", 1, 1.0, "U8", pack_int4(a), pack_int4(b), np.array([[0.5, 4]], dtype), np.array([[8]], dtype)
    )
    assert (part.in_features, part.out_features) == (80, 16)
    left, right = dequantize(part)
    assert left[0].tolist() == [1.5] * 64 + [12.0] * 16
    assert right[:, 0].tolist() == [-16.0] * 16


def test_a_plain_part_is_its_factors_with_the_scale_in_b():
    part = PackedPart("none", 1, 0.5, "BF16", np.array([[0x3F80]], np.uint16), np.array([[0x4000], [0]], np.uint16))
    left, right = dequantize(part)
    assert (left.tolist(), right.tolist()) == ([[1.0]], [[1.0], [0.0]])
