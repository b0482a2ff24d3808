"""What a backend must compute; everything else of the model is plain torch.

`cpu` is for CPUs, `triton` for CUDA devices, `eager` for what those do not compute; `reference` is the float32 oracle
every backend is tested against.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from worker.kernels.layout import Arena, Batch, Site
from worker.kernels.linear import Linear
from worker.kernels.placing import Placer, SiteShape


class StepKernels(Protocol):
    """The operators over one step's T rows. Hq query heads, Hk key/value heads, D head dimensions.

    Tensors are of the backend's activation dtype and contiguous; linears are as the backend packed them. Results
    may be read after `finish`, until the next step begins.
    """

    def embed(self, embedding: Linear, token_ids: Tensor) -> Tensor:
        """Return the rows of W, [vocab, hidden], of some tokens, [T] int64 on the device: [T, hidden]."""
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

        Columns of modules with an affine then become scale · y + shift. y [T, out], what the base's linear gave, its
        bias included; x [T, in].
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


@runtime_checkable
class Replaying(Protocol):
    """What operators of steps that can be computed again as a whole offer beside `StepKernels`."""

    def remember(self, *results: Tensor) -> None:
        """Take note that these are a finished step's results: one like it may then be replayed."""
        ...

    def replay(self, token_ids: Tensor) -> tuple[Tensor, ...] | None:
        """Compute the step as the last one like it and return what that remembered; None if there is none.

        To be called before any operator. token_ids [T] int64, on the device.
        """
        ...


class Kernels(Protocol):
    """A backend bound to a model's shape and an arena."""

    def step(self, batch: Batch) -> StepKernels:
        """Return the operators for a step; valid until the next call."""
        ...


Forward = Callable[[StepKernels, Tensor], Tensor]
"""A whole model over one step's operators: token ids [T] int64 to logits [T, vocab]."""


class PreparedDecodes(Protocol):
    """Decode steps made ready beforehand, each for steps up to its size."""

    def capture(self) -> None:
        """Make them ready, before the first request."""
        ...

    def logits(self, batch: Batch) -> Tensor | None:
        """Run a step of one row per request and return its rows' logits [T, vocab] float32, valid until the next call.

        None, without having done anything, where none stands for this step.
        """
        ...


@runtime_checkable
class DeviceKernels(Protocol):
    """What a backend of a device of its own offers beside `Kernels`."""

    def placer(self, sites: Sequence[SiteShape], *, num_slots: int) -> Placer:
        """Return the way adapters come into the arena; to be called once, before the first step."""
        ...

    def warm_up(self, forward: Forward) -> None:
        """Compile what any step may need, so that no request has to wait for it."""
        ...

    def decode_graphs(self, forward: Forward, *, max_rows: int) -> PreparedDecodes:
        """Return decode steps of up to so many rows, still to be captured."""
        ...


class Backend(Protocol):
    """A kind of kernels."""

    def pack(self, linear: Linear) -> Linear:
        """Return a plain linear as these kernels want it; may share its memory."""
        ...

    def bind(self, arena: Arena, cos: Tensor, sin: Tensor) -> Kernels:
        """Return kernels for an arena and the tables of rotary positions, cos and sin [positions, D/2] float32."""
        ...
