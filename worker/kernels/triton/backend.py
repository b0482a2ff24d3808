"""`Kernels` for CUDA devices: base products by torch, everything else by the Triton kernels.

Nothing waits for the device here: a step's inputs go there in one transfer, and what its operators return are tensors
that the device has yet to write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from worker.kernels.draws import Draws
from worker.kernels.interface import Forward
from worker.kernels.layout import Arena, Batch
from worker.kernels.linear import Linear
from worker.kernels.placing import SiteShape
from worker.kernels.triton.adapters import TablePlacer
from worker.kernels.triton.attention import AttentionWork, attention_room
from worker.kernels.triton.drawing import draw
from worker.kernels.triton.graphs import DecodeGraphs
from worker.kernels.triton.lora import LoraConfig, allocate_h
from worker.kernels.triton.plan import StepInputs, plan_step
from worker.kernels.triton.platform import Platform
from worker.kernels.triton.step import Model, Room, SideStream, TritonStep
from worker.kernels.triton.tiles import Format
from worker.kernels.triton.work import DECODE_GROUP_ROWS, PREFILL_GROUP_ROWS, AffineWork, FixedWork
from worker.mailbox import Sampling

FORMATS = frozenset({Format.BF16, Format.INT8, Format.INT4})
"""Formats that tiles come in; the kernels' code for others is left out."""


class TritonBackend:
    """`Backend` of the Triton kernels."""

    def pack(self, linear: Linear) -> Linear:
        """See Backend."""
        if linear.scales is not None:
            raise ValueError("weights in whole numbers are for the CPU's kernels")
        return linear

    def bind(self, arena: Arena, cos: Tensor, sin: Tensor) -> TritonKernels:
        """See Backend."""
        return TritonKernels(arena, cos, sin)


class TritonKernels:
    """`Kernels`, `Drawing`, and `DeviceKernels`: adapters placed in its own way, decode steps captured as graphs."""

    def __init__(self, arena: Arena, cos: Tensor, sin: Tensor) -> None:
        """cos, sin [positions, D/2] float32 on the arena's device."""
        self._arena, self._max_positions = arena, len(cos)
        device = arena.memory.device
        self._model = Model(
            arena.shape,
            Platform.of(device, arena.kv.dtype),
            arena.kv.dtype,
            arena.memory,
            cos.contiguous(),
            sin.contiguous(),
            SideStream(device),
            lora=None,
            table=None,
        )

    def placer(self, sites: Sequence[SiteShape], *, num_slots: int) -> TablePlacer:
        """See DeviceKernels."""
        placer = TablePlacer(self._arena, sites, num_slots=num_slots)
        lora = LoraConfig(placer.geometry, self._model.platform, FORMATS)
        self._model = replace(self._model, lora=lora, table=placer.table)
        return placer

    def step(self, batch: Batch) -> TritonStep:
        """See Kernels."""
        return self.step_of(plan_step(self._model.shape, self._model.table, batch).to(self._arena.memory.device))

    def step_of(self, inputs: StepInputs) -> TritonStep:
        """Return the operators over inputs on the device."""
        self._model.side.join()  # of a step that did not come to its end
        return TritonStep(self._model, inputs, self._room(inputs))

    def draw(self, logits: Tensor, draws: Draws) -> Tensor:
        """See Drawing."""
        return draw(logits, draws)

    def decode_graphs(self, forward: Forward, *, max_rows: int) -> DecodeGraphs:
        """See DeviceKernels."""
        return DecodeGraphs(self._model, forward, max_rows=max_rows, max_positions=self._max_positions)

    def warm_up(self, forward: Forward) -> None:
        """See DeviceKernels. A step of two rows that attend to nothing and have adapters without tiles, and a draw."""
        device, rows = self._arena.memory.device, 2
        lora = self._model.lora
        places = (
            []
            if lora is None
            else [
                FixedWork(lora.geometry, rows=rows, max_tiles=1, group_rows=group_rows, device=device).work
                for group_rows in (DECODE_GROUP_ROWS, PREFILL_GROUP_ROWS)
            ]
        )
        nothing = torch.zeros(rows, 5, dtype=torch.int32, device=device)
        row = torch.tensor([[0, 0, 0], [1, 0, 0]], dtype=torch.int32, device=device)
        attention = (AttentionWork(nothing, nothing[0], row), AttentionWork(nothing, nothing[0], None))
        positions = torch.zeros(rows, dtype=torch.int32, device=device)
        affine = None
        if lora is not None:
            sites = len(lora.geometry.sites)
            affine = AffineWork((positions - 1,) * sites, (positions,) * sites, (True,) * sites)
        inputs = StepInputs(positions, positions.long() - 1, attention, tuple(places), affine)
        logits = forward(self.step_of(inputs), positions.long())
        filtered = Sampling(temperature=0.5, top_p=0.5, min_p=0.5)
        self.draw(logits.float(), Draws.of(range(2), [filtered] * 2, np.full(2, 0.5)))

    def _room(self, inputs: StepInputs) -> Room:
        model, device = self._model, self._arena.memory.device
        lora = model.lora
        if lora is None or not inputs.lora:
            h: tuple[Tensor, ...] = ()
            deltas: tuple[Tensor, ...] = ()
        else:
            h = tuple(allocate_h(lora, work, device) for work in inputs.lora)
            rows = len(inputs.positions)
            deltas = tuple(
                torch.empty(rows, sum(site.widths), dtype=model.dtype, device=device) for site in lora.geometry.sites
            )
        attention = tuple(
            attention_room(model.shape, 0 if work.rows is None else len(work.items), device)
            for work in inputs.attention
        )
        return Room(attention, h, deltas)
