"""What a backend must compute; everything else of the model is plain torch.

`eager` is the fast path in torch operators, `reference` the float32 oracle every backend is tested against.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from worker.kernels.layout import AttentionPlan, KvCache, LoraGroup, Site


class Kernels(Protocol):
    """The operators of one backend. T rows, Hq query heads, Hk key/value heads, D head dimensions."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return weight · x / sqrt(mean(x²) + eps) over the last dimension, the mean in float32, in x's dtype.

        x [..., D]; weight [D], or [heads, D] for x [T, heads, D].
        """
        ...

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate each head's dimension pairs (i, i + D/2): (a·cos - b·sin, b·cos + a·sin); a new tensor of x's dtype.

        x [T, heads, D]; cos, sin [T, 1, D/2] float32 of each row's position.
        """
        ...

    def attention(self, q: Tensor, k: Tensor, v: Tensor, cache: KvCache, layer: int, plan: AttentionPlan) -> Tensor:
        """Write the rows' keys and values into the cache, then softmax(q·kᵀ / sqrt(D)) v over what each row may see.

        q [T, Hq, D]; k, v [T, Hk, D]; returns [T, Hq · D] of q's dtype. Query head h reads key head h // (Hq / Hk).
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) · up of gate_up [T, 2 · inner]; returns [T, inner], may overwrite its input."""
        ...

    def lora_add(self, y: Tensor, x: Tensor, groups: Sequence[LoraGroup], layer: int, site: Site) -> None:
        """Add scale · B (A x) to y for the rows of each group, in place; rows outside all groups are left alone.

        y [T, out], x [T, in], both of the model's dtype.
        """
        ...
