"""A linear layer of the base model: y = x Wᵀ + b, with the weight laid out for the device it runs on."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

_PACKED_ROWS: Final = 32  # oneDNN lays a weight out for about this many rows of x; other numbers are right, if slower


class Linear:
    """Owns one weight, [out, in], and its bias, [out] or None.

    On a CPU the weight is reordered once for oneDNN; laying it out anew at every call costs more than the product does
    at a few rows. The plain weight is not kept.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._is_packed = _can_pack(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS) if self._is_packed else weight  # noqa: SLF001 - torch has no other name for it

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, out] for x [T, in], in x's dtype."""
        if not self._is_packed:
            return functional.linear(x, self._weight, self._bias)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")  # noqa: SLF001
        return y


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:  # noqa: SLF001
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001
    return weight.dtype == torch.float32
