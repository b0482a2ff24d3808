"""Decode steps captured as CUDA graphs: one launch for a whole step, for steps of certain sizes.

What a graph reads (tokens, positions, tables) lies at fixed places that are written before each replay; rows and work
that a step does not have count nothing. On a device without graphs the same steps run kernel by kernel, so that all but
the capture itself is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.kernels.interface import Forward
from worker.kernels.layout import BLOCK_TOKENS, Batch
from worker.kernels.triton.attention import KEYS_PER_SPLIT, AttentionWork, attention_room
from worker.kernels.triton.graph_shapes import GraphShape, bucket_of, choose, graph_shapes
from worker.kernels.triton.lora import allocate_h
from worker.kernels.triton.plan import StepInputs, adapter_slots, decode_attention
from worker.kernels.triton.staging import Staged
from worker.kernels.triton.step import Model, Room, SideStream, TritonStep
from worker.kernels.triton.work import DECODE_GROUP_ROWS, FixedWork, StepWork, plan_work, tiles_needed

BLOCKS_PER_PIECE: Final = KEYS_PER_SPLIT // BLOCK_TOKENS
MAX_ROOM_BYTES: Final = 128 * 2**20
"""Of attention's partial results; steps with more keys run without a graph."""

log = structlog.get_logger(__name__)


class DecodeGraphs:
    """Captured decode steps of one model. All belongs to the engine's thread and stream."""

    def __init__(self, model: Model, forward: Forward, *, max_rows: int, max_positions: int) -> None:
        self._device = model.arena.device
        # A side stream of its own: outside a capture, nothing may wait for an event that was recorded inside one.
        self._model, self._forward = replace(model, side=SideStream(self._device)), forward
        heads, dim = model.shape.num_heads, model.shape.head_dim
        self._shapes = graph_shapes(
            max_rows,
            max_row_pieces=-(-max_positions // KEYS_PER_SPLIT),
            max_pieces=max(MAX_ROOM_BYTES // (4 * heads * (dim + 2)), max_rows),
            max_rank_tiles=0 if model.lora is None else model.lora.geometry.max_tiles,
        )
        self._graphs: dict[GraphShape, _Graph] = {}
        self._planned: _Planned | None = None

    @property
    def shapes(self) -> tuple[GraphShape, ...]:
        """Sizes of the steps that are captured."""
        return tuple(self._graphs)

    def capture(self) -> None:
        """Capture all sizes, the largest first; before the first request, as nothing else may use the device.

        Where one fails, for want of memory say, the sizes that are left run without a graph.
        """
        try:
            shared = _Shared(self._model, self._shapes)
            for shape in self._shapes:
                graph = _Graph(self._model, shape, shared, self._forward)
                graph.capture()
                self._graphs[shape] = graph
        except RuntimeError:  # out of memory, or a driver that does not capture: slower is better than not at all
            log.exception("graphs.capture_failed", captured=len(self._graphs), sizes=len(self._shapes))
            if self._device.type == "cuda":
                torch.cuda.set_stream(torch.cuda.default_stream(self._device))  # a failed capture may leave its own
        else:
            log.info("graphs.captured", sizes=len(self._graphs), device=self._device.type)

    def logits(self, batch: Batch) -> Tensor | None:
        """Run a step and return its rows' logits [T, vocab] float32, valid until the next call.

        None, without having done anything, where no graph stands for the step: it has rows that are no decodes, or
        adapters with affines, or is larger than any.
        """
        rows = len(batch.requests)
        bucket = bucket_of(self._graphs, rows)
        if bucket is None or len(batch.positions) != rows:
            return None
        slots, table = adapter_slots(batch.requests, rows), self._model.table
        if slots is not None and table is not None and table.affine_sites[slots[slots >= 0]].any():
            return None
        attention = decode_attention(batch.requests)
        lora = self._plan(slots, bucket)
        needed = 0 if lora is None else lora.rank_tiles
        shape = choose(self._graphs, bucket=bucket, pieces=len(attention.items), rank_tiles=needed)
        if shape is None or len(attention.blocks) > shape.pieces * BLOCKS_PER_PIECE:
            return None
        return self._graphs[shape].run(batch, attention, lora)

    def _plan(self, slots: NDArray[np.int64] | None, bucket: int) -> _Planned | None:
        """Plan a step's LoRA; the plan of the last step holds for the next, unless a row or an adapter has changed."""
        table = self._model.table
        if slots is None or table is None:
            return None
        key = (table.version, bucket, slots.tobytes())
        if self._planned is None or self._planned.key != key:
            work = plan_work(slots, table, group_rows=DECODE_GROUP_ROWS)
            self._planned = _Planned(key, work, tiles_needed(work, bucket))
        return self._planned


@dataclass(frozen=True, slots=True)
class _Planned:
    """A step's LoRA."""

    key: tuple[int, int, bytes]
    """Version of the table, rows of the graph, adapter slots: plans of one key are equal."""
    work: StepWork
    rank_tiles: int


class _Shared:
    """Buffers that all graphs use in turn, and the pool that their intermediate results come from."""

    def __init__(self, model: Model, shapes: list[GraphShape]) -> None:
        device = model.arena.device
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.attention = attention_room(model.shape, max(shape.pieces for shape in shapes), device)
        self.rows = max(shape.rows for shape in shapes)
        self.logits: Tensor | None = None  # as wide as the first graph's
        self.deltas: tuple[Tensor, ...] = ()
        self.h: Tensor | None = None  # as large as the first graph with LoRA needs, the largest
        if model.lora is not None:
            self.deltas = tuple(
                torch.empty(self.rows, sum(site.widths), dtype=model.dtype, device=device)
                for site in model.lora.geometry.sites
            )


@dataclass(frozen=True, slots=True)
class _Places:
    """Where a graph's inputs lie in `Staged`, by index."""

    token_ids: int = 0
    positions: int = 1
    slots: int = 2
    items: int = 3
    blocks: int = 4
    rows: int = 5


_AT: Final = _Places()


class _Graph:
    """One size: its inputs' places, its step, and the capture of it."""

    def __init__(self, model: Model, shape: GraphShape, shared: _Shared, forward: Forward) -> None:
        self._shape, self._shared, self._forward = shape, shared, forward
        device, rows = model.arena.device, shape.rows
        self._device = device
        self._staged = Staged(
            [
                ((rows,), torch.int64),
                ((rows,), torch.int32),
                ((rows,), torch.int64),
                ((shape.pieces, 5), torch.int32),
                ((shape.pieces * BLOCKS_PER_PIECE,), torch.int32),
                ((rows, 3), torch.int32),
            ],
            device,
        )
        self._lora: FixedWork | None = None
        self._filled: tuple[int, int, bytes] | None = None  # key of the plan that lies there
        h: tuple[Tensor, ...] = ()
        if shape.rank_tiles and model.lora is not None:
            self._lora = FixedWork(
                model.lora.geometry,
                rows=rows,
                max_tiles=shape.rank_tiles,
                group_rows=DECODE_GROUP_ROWS,
                device=device,
            )
            if shared.h is None:
                shared.h = allocate_h(model.lora, self._lora.work, device)
            h = (shared.h,)
        tensors = self._staged.tensors
        inputs = StepInputs(
            tensors[_AT.positions],
            tensors[_AT.slots],
            (AttentionWork(tensors[_AT.items], tensors[_AT.blocks], tensors[_AT.rows]),),
            () if self._lora is None else (self._lora.work,),
        )
        deltas = tuple(delta[:rows] for delta in shared.deltas) if h else ()
        self._step = TritonStep(model, inputs, Room((shared.attention,), h, deltas))
        self._replay: Callable[[], None] = self._compute

    def capture(self) -> None:
        """Compile what is not compiled, then capture; where there is no GPU, steps run kernel by kernel."""
        if self._device.type != "cuda":
            return
        self._staged.blank()[_AT.slots][:] = -1
        self._staged.copy()
        self._compute()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._shared.pool):
            self._compute()
        self._replay = graph.replay

    def run(self, batch: Batch, attention: AttentionWork, lora: _Planned | None) -> Tensor:
        """Write the inputs and replay; returns the rows' logits."""
        rows = len(batch.positions)
        arrays = self._staged.blank()
        arrays[_AT.token_ids][:rows] = batch.token_ids
        arrays[_AT.positions][:rows] = batch.positions
        arrays[_AT.slots][:rows] = batch.slots
        arrays[_AT.slots][rows:] = -1  # rows that are there to fill up write no keys,
        arrays[_AT.rows][rows:, 0] = np.arange(rows, self._shape.rows)  # and attend to nothing
        for place, tensor in ((_AT.items, attention.items), (_AT.blocks, attention.blocks), (_AT.rows, attention.rows)):
            assert tensor is not None  # noqa: S101 - decodes have all three
            arrays[place][: len(tensor)] = tensor.numpy()
        self._staged.copy()
        if batch.pending is not None:
            batch.pending.fill(self._staged.tensors[_AT.token_ids])
        if self._lora is not None and lora is not None and self._filled != lora.key:
            self._lora.fill(lora.work)
            self._filled = lora.key
        self._replay()
        assert self._shared.logits is not None  # noqa: S101 - the capture made them
        return self._shared.logits[:rows]

    def _compute(self) -> None:
        logits = self._forward(self._step, self._staged.tensors[_AT.token_ids])
        if self._shared.logits is None:  # before any capture
            self._shared.logits = torch.empty(
                self._shared.rows, logits.shape[1], dtype=torch.float32, device=logits.device
            )
        self._shared.logits[: len(logits)].copy_(logits)
