"""Random LoRA modules in every format, with the factors they stand for: what kernels are checked with.

Plain rounding, for speed; how adapters are quantized when they are registered is another matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worker.kernels.triton.tiles import GROUP, Format, RankPart

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Factors:
    """ΔW = b @ a in float32, scales included: a [r, K], b [N, r]."""

    a: Floats
    b: Floats


def random_part(fmt: Format, rank: int, in_features: int, out_features: int, seed: int) -> tuple[RankPart, Factors]:
    """Return `rank` random rows in `fmt` and what they decode to."""
    random = np.random.default_rng(seed)
    a = random.standard_normal((rank, in_features), dtype=np.float32) / in_features**0.5
    b_t = random.standard_normal((rank, out_features), dtype=np.float32) / rank**0.5
    scale = random.uniform(0.5, 2.0, rank).astype(np.float32)
    shape = (in_features, out_features)
    if fmt is Format.INT8:
        (qa, sa), (qb, sb) = _int8(a), _int8(b_t)
        folded = (scale * sa * sb).astype(np.float32)
        return RankPart(fmt, qa, qb, folded, *shape), Factors(qa * folded[:, None], qb.T.astype(np.float32))
    if fmt is Format.INT4:
        (na, sa, a), (nb, sb, b_t) = _int4(a, scale), _int4(b_t, None)
        return RankPart(fmt, na, nb, scale, *shape, sa, sb), Factors(a, b_t.T)
    bits = _half if fmt is Format.FP16 else _bfloat16
    (bits_a, a), (bits_b, b_t) = bits(a), bits(b_t)
    return RankPart(fmt, bits_a, bits_b, scale, *shape), Factors(a * scale[:, None], b_t.T)


def round_bfloat16(x: Floats) -> Floats:
    """Round to the nearest bfloat16, ties to even."""
    return _bfloat16(x)[1]


def _bfloat16(x: Floats) -> tuple[NDArray[np.uint16], Floats]:
    wide = np.ascontiguousarray(x).view(np.uint32)
    bits = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32)


def _half(x: Floats) -> tuple[NDArray[np.uint16], Floats]:
    half = x.astype(np.float16)
    return half.view(np.uint16), half.astype(np.float32)


def _int8(x: Floats) -> tuple[NDArray[np.int8], Floats]:
    scale = np.abs(x).max(axis=1) / 127
    return np.round(x / scale[:, None]).astype(np.int8), scale


def _int4(x: Floats, row_scale: Floats | None) -> tuple[NDArray[np.uint8], Floats, Floats]:
    """Nibbles, group scales without `row_scale`, and the values that kernels see, which round scales to bfloat16."""
    columns = x.shape[1]
    nibbles, scales, values = [], [], []
    for first in range(0, columns, GROUP):
        group = x[:, first : first + GROUP]
        scale = np.abs(group).max(axis=1) / 7
        q = np.clip(np.round(group / scale[:, None]), -8, 7)
        code = (q + 8).astype(np.uint8)
        half = -(-code.shape[1] // 2)
        low, high = code[:, :half], np.zeros_like(code[:, :half])
        high[:, : code.shape[1] - half] = code[:, half:]
        nibbles.append(low | (high << 4))
        scales.append(scale)
        seen = round_bfloat16((scale if row_scale is None else scale * row_scale).astype(np.float32))
        values.append((q * seen[:, None]).astype(np.float32))
    return np.concatenate(nibbles, axis=1), np.stack(scales, axis=1), np.concatenate(values, axis=1)
