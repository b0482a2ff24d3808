"""From a packed module of format `none` to the part that tiles are cut from; quantized ones are packed as RankPart."""

from __future__ import annotations

import numpy as np

from common.adapter_format.packed import PackedModule
from worker.kernels.triton.tiles import Format, RankPart, round_to_bfloat16


def sixteen_bit_part(module: PackedModule) -> RankPart:
    """Take bfloat16 and float16 as they are, and round float32, which the kernels do not read, to bfloat16."""
    a, b_t = module.a, module.b.T
    fmt = Format.FP16 if module.dtype == "F16" else Format.BF16
    if module.dtype == "F32":
        a, b_t = round_to_bfloat16(a), round_to_bfloat16(b_t)
    scale = np.full(module.rank, module.scale, dtype=np.float32)
    return RankPart(fmt, a.view(np.uint16), b_t.view(np.uint16), scale, module.a.shape[1], module.b.shape[0])
