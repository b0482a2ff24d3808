"""A linear layer of the base model: y = x Wᵀ + b."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Linear:
    """One weight, [out, in], contiguous, and its bias, [out] in the dtype of activations, or None.

    On a CPU the weight is float32 or, as it widens to that without loss, bfloat16.
    """

    weight: Tensor
    bias: Tensor | None

    @property
    def out_features(self) -> int:
        """Width of y."""
        return self.weight.shape[0]
