"""Rotary position embeddings: which variants config.json may ask for, and their inverse frequencies.

Variants: `default`, `linear` (positions divided by a factor) and `llama3` (long wavelengths
divided, short ones kept, a ramp between; Llama 3.1). Others change with the sequence's length or scale attention, and
are refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from loraplex.errors import InvalidBaseModel

VARIANTS: Final = ("default", "linear", "llama3")
_DEFAULT_THETA: Final = 10000.0


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Parameters of the rotation; the last four count for their variants only."""

    variant: str
    theta: float
    head_dim: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192

    def inverse_frequencies(self) -> Tensor:
        """Radians per position of each pair of dimensions, [head_dim / 2], computed in float32 as the models were.

        At long contexts a last-bit difference here is a visible angle, so the order of operations is theirs too.
        """
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        inverse = 1.0 / (self.theta**exponents)
        if self.variant == "linear":
            return inverse / self.factor
        if self.variant == "llama3":
            return self._llama3(inverse)
        return inverse

    def _llama3(self, inverse: Tensor) -> Tensor:
        wavelengths = 2 * math.pi / inverse
        turns = self.original_positions / wavelengths
        ramp = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = ramp.clamp(0.0, 1.0)  # 1 for short wavelengths, 0 for long ones
        return (1 - kept) * inverse / self.factor + kept * inverse

    def tables(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of every position's angles, each [num_positions, head_dim / 2] float32."""
        positions = torch.arange(num_positions, dtype=torch.float32)
        angles = positions[:, None] * self.inverse_frequencies()
        return angles.cos(), angles.sin()


def rope_from_config(raw: Mapping[str, Any], head_dim: int, max_positions: int) -> RopeConfig:
    """Return the rotation a parsed config.json asks for. Raises InvalidBaseModel, naming the field."""
    field = "rope_parameters" if raw.get("rope_parameters") is not None else "rope_scaling"
    scaling = raw.get(field) or {}
    if not isinstance(scaling, Mapping):
        raise _refusal(field, f"{field} must be an object, not {scaling!r}")
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise _refusal(field, f"{field} differs between layer types, which is not supported")
    variant = scaling.get("rope_type", scaling.get("type", "default"))
    if variant not in VARIANTS:
        raise _refusal(field, f"rope type {variant!r} is not supported; supported are {', '.join(VARIANTS)}")
    partial = scaling.get("partial_rotary_factor", 1.0)
    if partial not in (None, 1, 1.0):
        raise _refusal(field, f"{field}.partial_rotary_factor {partial!r} is not supported, only 1")
    theta = scaling.get("rope_theta", raw.get("rope_theta"))
    theta = _positive(_DEFAULT_THETA if theta is None else theta, "rope_theta")
    if variant == "default":
        return RopeConfig(variant, theta, head_dim)
    factor = _positive(scaling.get("factor"), f"{field}.factor")
    if variant == "linear":
        return RopeConfig(variant, theta, head_dim, factor=factor)
    low = _positive(scaling.get("low_freq_factor"), f"{field}.low_freq_factor")
    high = _positive(scaling.get("high_freq_factor"), f"{field}.high_freq_factor")
    if high <= low:
        raise _refusal(field, f"{field}.high_freq_factor {high} must be larger than low_freq_factor {low}")
    name = "original_max_position_embeddings"
    original = raw.get(name, scaling.get(name))
    original_positions = int(_positive(max_positions if original is None else original, f"{field}.{name}"))
    return RopeConfig(variant, theta, head_dim, factor, low, high, original_positions)


def _positive(value: Any, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise _refusal(field, f"config.json: {field} must be a positive number, not {value!r}")
    return float(value)


def _refusal(field: str, message: str) -> InvalidBaseModel:
    return InvalidBaseModel(message, field=field)
