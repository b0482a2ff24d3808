"""Weight-only INT8 of the base model: half of bfloat16's bytes, which is what a step of few rows waits for."""

from __future__ import annotations

from typing import Final

import torch

from loraplex.errors import InvalidParameter
from worker.kernels.linear import Linear

BASE_QUANTIZATIONS: Final = ("none", "int8")
"""How a base model's matrices may be kept: as they are stored, or in 8 bits an element."""

_LEVELS: Final = 127.0


def check_base_quantization(asked: str, device: torch.device) -> None:
    """Raise InvalidParameter for one that is not known, or that the device's kernels do not compute with."""
    if asked not in BASE_QUANTIZATIONS:
        raise InvalidParameter(
            f"base_quantization {asked!r} is not known; give {' or '.join(BASE_QUANTIZATIONS)}",
            field="base_quantization",
        )
    if asked != "none" and device.type != "cpu":
        raise InvalidParameter(
            f"base_quantization {asked} is for CPUs; on {device.type} leave it out", field="base_quantization"
        )


def quantize_linear(linear: Linear) -> Linear:
    """Return a plain linear with its weight in whole numbers of -127 to 127 and a scale per output, [out] float32.

    Symmetric, the largest number of an output at 127; an output of zeros has scale 0. Weights that are not finite stay
    visible: their scale is not finite either.
    """
    weight = linear.weight.float()
    scales = weight.abs().amax(dim=1) / _LEVELS
    whole = (weight / torch.where(scales > 0, scales, 1.0)[:, None]).round().clamp_(-_LEVELS, _LEVELS)
    quantized = whole.nan_to_num(nan=1.0).to(torch.int8)
    return Linear(linear.out_features, linear.in_features, quantized, linear.bias, scales)
