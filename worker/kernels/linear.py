"""A linear layer of the base model: y = x Wᵀ + b."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Linear:
    """One weight W, [out, in], and its bias.

    `plain` makes one that any backend takes; `Backend.pack` lays it out for the backend, which alone knows how then.
    """

    out_features: int
    in_features: int
    weight: Tensor
    bias: Tensor | None
    scales: Tensor | None = None
    """Factors of the outputs of a weight in whole numbers."""

    @classmethod
    def plain(cls, weight: Tensor, bias: Tensor | None) -> Linear:
        """Return the layer of a contiguous weight, [out, in], and a bias, [out] in the dtype of activations, or None.

        On a CPU the weight is float32 or, as it widens to that without loss, bfloat16.
        """
        outputs, inner = weight.shape
        return cls(outputs, inner, weight, bias)
