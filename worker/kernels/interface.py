"""What a backend must compute; everything else of the model is plain torch.

`cpu` is for CPUs, `eager` for any other device; `reference` is the float32 oracle every backend is tested against.
`triton` holds CUDA kernels that are no backend yet.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from worker.kernels.layout import Arena, Batch, Site
from worker.kernels.linear import Linear


class StepKernels(Protocol):
    """The operators over one step's T rows. Hq query heads, Hk key/value heads, D head dimensions.

    Tensors are of the backend's activation dtype and contiguous; linears are as the backend packed them. Results
    may be read after `finish`, until the next step begins.
    """

    def embed(self, embedding: Linear, token_ids: NDArray[np.int64]) -> Tensor:
        """Return the rows of W, [vocab, hidden], of some tokens: [T, hidden]."""
        ...

    def linear(self, linear: Linear, x: Tensor) -> Tensor:
        """Return x Wᵀ + b, [T, out], for x [T, in]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return weight · x / sqrt(mean(x²) + eps), the mean in float32. x [T, D]; weight [D]."""
        ...

    def add_rms_norm(self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add delta to residual in place and return the sum's norm. residual, delta [T, D]; weight [D]."""
        ...

    def add(self, residual: Tensor, delta: Tensor) -> None:
        """Add delta to residual in place; [T, D] both."""
        ...

    def attention(self, qkv: Tensor, layer: int, qk_norm: Tensor | None, eps: float) -> Tensor:
        """Attend each row to its own and earlier positions of its request; returns [T, Hq · D].

        qkv [T, (Hq + 2·Hk) · D] may be overwritten. Queries and keys are normalized by qk_norm [Hq + Hk, D], if there
        is one, then rotated: dimension pairs (i, i + D/2) become (a·cos - b·sin, b·cos + a·sin). Keys and values go to
        the cache, then softmax(q·kᵀ / sqrt(D)) v is taken over all positions so far; query head h reads key head
        h // (Hq / Hk).
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) · up of gate_up [T, 2 · inner], [T, inner]; may overwrite its input."""
        ...

    def lora_add(self, y: Tensor, x: Tensor, layer: int, site: Site) -> None:
        """Add scale · B (A x) of each row's adapter to y, in place; rows without an adapter are left alone.

        y [T, out], x [T, in].
        """
        ...

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's largest number, NaN if there is one, and where it first is: [S] float32 and [S] int64.

        logits [S, vocab]. The place has no meaning for NaN.
        """
        ...

    def finish(self) -> None:
        """Compute what was put off: only after this may results be read."""
        ...


class Kernels(Protocol):
    """A backend bound to a model's shape and an arena."""

    def step(self, batch: Batch) -> StepKernels:
        """Return the operators for a step; valid until the next call."""
        ...


class Backend(Protocol):
    """A kind of kernels."""

    def pack(self, linear: Linear) -> Linear:
        """Return a plain linear as these kernels want it; may share its memory."""
        ...

    def bind(self, arena: Arena, cos: Tensor, sin: Tensor) -> Kernels:
        """Return kernels for an arena and the tables of rotary positions, cos and sin [positions, D/2] float32."""
        ...
