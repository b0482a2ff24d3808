"""A step's operators over the Triton kernels; base products by torch.

`lora_add` adds nothing yet: it computes a delta buffer, on a side stream beside the base's product, which the next
operator adds as it reads that product. A captured graph and a step without one run this same code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from worker.kernels.layout import AttentionShape, Site
from worker.kernels.linear import Linear
from worker.kernels.triton.attention import attention, rope
from worker.kernels.triton.directory import TileTable
from worker.kernels.triton.fused import add, add_norm, rms_norm, silu_mul
from worker.kernels.triton.lora import LoraConfig, expand, scale_and_shift, shrink
from worker.kernels.triton.plan import StepInputs
from worker.kernels.triton.platform import Platform


class SideStream:
    """A second stream, and the events that tie it to the engine's. Does nothing where the device has no streams."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        if self._cuda:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._fork = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._join = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def fork(self) -> None:
        """Mark the place in the engine's stream that the next `beside` starts from."""
        if self._cuda:
            self._fork.record()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Enqueue on the side stream, after what the last `fork` marked."""
        if not self._cuda:
            yield
            return
        self._stream.wait_event(self._fork)
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._join.record()

    def join(self) -> None:
        """Let the engine's stream wait for the last `beside`."""
        if self._cuda:
            torch.cuda.current_stream().wait_event(self._join)


@dataclass(frozen=True, slots=True)
class Model:
    """What all steps share."""

    shape: AttentionShape
    platform: Platform
    dtype: torch.dtype
    """Of activations, keys and values."""
    arena: Tensor
    """uint8 bytes."""
    cos: Tensor
    sin: Tensor
    side: SideStream
    lora: LoraConfig | None
    table: TileTable | None


@dataclass(frozen=True, slots=True)
class Room:
    """Buffers that kernels of one step hand on. Taken before the step's first kernel, and kept to its end.

    The side stream starts from marks in the engine's. Were a buffer taken after the mark, it might be memory that
    something between the two, a product's workspace say, has been given and is still using.
    """

    attention: tuple[tuple[Tensor, Tensor], ...]
    """By AttentionWork."""
    h: tuple[Tensor, ...]
    """By StepWork."""
    deltas: tuple[Tensor, ...]
    """[T, the site's width] by site; empty where no row has an adapter."""


@dataclass(frozen=True, slots=True)
class _Delta:
    """What is still to be added to y. Holds x, which the side stream may still read."""

    y: Tensor
    x: Tensor
    delta: Tensor
    adapted: Tensor


class TritonStep:
    """`StepKernels` over one step's inputs, which lie on the device."""

    def __init__(self, model: Model, inputs: StepInputs, room: Room) -> None:
        self._model, self._inputs, self._room = model, inputs, room
        self._input: Tensor | None = None  # of the last product: the side stream may start from there
        self._pending: _Delta | None = None

    def linear(self, linear: Linear, x: Tensor) -> Tensor:
        """See StepKernels."""
        self._settle()
        if self._inputs.lora:
            self._model.side.fork()
            self._input = x
        return functional.linear(x, linear.weight.to(x.dtype), linear.bias)

    def embed(self, embedding: Linear, token_ids: Tensor) -> Tensor:
        """See StepKernels."""
        return functional.embedding(token_ids, embedding.weight)

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """See StepKernels."""
        return logits.amax(dim=-1).float(), logits.argmax(dim=-1)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See StepKernels."""
        self._settle()
        out = torch.empty_like(x)
        rms_norm(x, weight, eps, out)
        return out

    def add_rms_norm(self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See StepKernels."""
        lora = self._take(delta)
        out = torch.empty_like(residual)
        add_norm(residual, delta, weight, eps, out, delta=lora)
        return out

    def add(self, residual: Tensor, delta: Tensor) -> None:
        """See StepKernels."""
        add(residual, delta, delta=self._take(delta))

    def attention(self, qkv: Tensor, layer: int, qk_norm: Tensor | None, eps: float) -> Tensor:
        """See StepKernels."""
        model, inputs = self._model, self._inputs
        shape = model.shape
        lora = self._take(qkv)
        q = torch.empty(len(qkv), shape.num_heads, shape.head_dim, dtype=qkv.dtype, device=qkv.device)
        rope(
            shape, qkv, model.cos, model.sin, inputs.positions, inputs.slots, q, model.arena, layer,
            delta=lora, norm=None if qk_norm is None else (qk_norm, eps),
        )  # fmt: skip
        out = torch.empty_like(q)
        for work, room in zip(inputs.attention, self._room.attention, strict=True):
            attention(shape, model.platform, q, model.arena, layer, work, room, out)
        return out.flatten(1)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See StepKernels."""
        lora = self._take(gate_up)
        out = torch.empty(len(gate_up), gate_up.shape[1] // 2, dtype=gate_up.dtype, device=gate_up.device)
        silu_mul(gate_up, out, delta=lora)
        return out

    def lora_add(self, y: Tensor, x: Tensor, layer: int, site: Site) -> None:
        """See StepKernels."""
        self._settle()
        works = [work for work in self._inputs.lora if len(work.sites[site].groups)]
        if not works:
            return
        model = self._model
        assert model.lora is not None  # noqa: S101 - a step has no LoRA work without them
        assert model.table is not None  # noqa: S101
        if self._input is not x:
            model.side.fork()
        entries, delta = model.table.entries[layer], self._room.deltas[site]
        with model.side.beside():
            for work, h in zip(self._inputs.lora, self._room.h, strict=True):
                shrink(model.lora, site, x, model.arena, entries, work, h)
                expand(model.lora, site, delta, model.arena, entries, work, h, add=False)
        affine = self._inputs.affine
        if affine is None or not affine.sites[site]:
            self._pending = _Delta(y, x, delta, works[0].sites[site].adapted)
            return
        model.side.join()
        scale_and_shift(model.table, layer, site, y, delta, model.arena, affine.rows[site])
        self._pending = _Delta(y, x, delta, affine.rest[site])

    def finish(self) -> None:
        """See StepKernels."""
        self._settle()
        self._input = None

    def _take(self, y: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return y's delta and which rows have one, if there is one; the caller adds it. Anybody else's is added."""
        pending = self._pending
        if pending is None or pending.y is not y:
            self._settle()
            return None
        self._pending = None
        self._model.side.join()
        return pending.delta, pending.adapted

    def _settle(self) -> None:
        """Add a delta that no operator has taken."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._model.side.join()
            pending.y.add_(torch.where(pending.adapted[:, None] > 0, pending.delta, 0))
