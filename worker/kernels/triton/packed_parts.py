"""From the parts of a packed module to those that tiles are cut from."""

from __future__ import annotations

import numpy as np

from common.adapter_format.parts import FORMAT_NONE, PackedPart, widen
from worker.kernels.triton.tiles import Format, RankPart, round_to_bfloat16


def rank_part(part: PackedPart) -> RankPart:
    """Take quantized parts as they are, and unquantized ones as bfloat16.

    float32 and float16 are rounded here: a model of bfloat16 would round them in the kernels, to the same numbers.
    """
    sizes = (part.in_features, part.out_features)
    if part.format == FORMAT_NONE:
        scale = np.full(part.rank, part.scale, dtype=np.float32)
        a, b_t = (
            factor.view(np.uint16) if part.dtype == "BF16" else round_to_bfloat16(widen(factor, part.dtype))
            for factor in (part.a, part.b.T)
        )
        return RankPart(Format.BF16, a, b_t, scale, *sizes)
    if part.a_scale is None or part.b_scale is None:
        return RankPart(Format.INT8, part.a, part.b, np.asarray(part.scale, np.float32), *sizes)
    ones = np.ones(part.rank, dtype=np.float32)
    return RankPart(Format.INT4, part.a, part.b, ones, *sizes, part.a_scale, part.b_scale)
