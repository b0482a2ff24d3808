"""A step as the kernels see it: planned once on the host from the step's batch, the same for every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.kernels.layout import AttentionShape, Batch, Rows
from worker.kernels.triton.adapters import TableAdapter
from worker.kernels.triton.attention import AttentionWork, decode_items, prefill_items
from worker.kernels.triton.directory import TileTable
from worker.kernels.triton.staging import send
from worker.kernels.triton.work import (
    DECODE_GROUP_ROWS,
    PREFILL_GROUP_ROWS,
    AffineWork,
    StepWork,
    from_tensors,
    plan_affines,
    plan_work,
    tensors_of,
)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """All that kernels read of a step beside activations, on the host or on the device."""

    positions: Tensor
    """[T] int32."""
    slots: Tensor
    """[T] int64 where keys and values go: chunk · 16 + offset, negative for rows that write nothing."""
    attention: tuple[AttentionWork, ...]
    lora: tuple[StepWork, ...]
    """Decodes and parts of prompts apart, so that what a row computes does not depend on what shares the step. Each
    site's `adapted` counts the rows of both."""
    affine: AffineWork | None = None

    def to(self, device: torch.device) -> StepInputs:
        """Copy everything in one transfer."""
        tensors = [self.positions, self.slots]
        for attention in self.attention:
            tensors += [attention.items, attention.blocks]
            tensors += [] if attention.rows is None else [attention.rows]
        for lora in self.lora:
            tensors += tensors_of(lora)
        if self.affine is not None:
            tensors += [*self.affine.rows, *self.affine.rest]
        sent = iter(send(tensors, device))
        positions, slots = next(sent), next(sent)
        attentions = tuple(
            AttentionWork(next(sent), next(sent), None if work.rows is None else next(sent)) for work in self.attention
        )
        loras = tuple(from_tensors([next(sent) for _ in tensors_of(work)], work.group_rows) for work in self.lora)
        affine = None
        if self.affine is not None:
            rows, rest = (tuple(next(sent) for _ in self.affine.sites) for _ in range(2))
            affine = AffineWork(rows, rest, self.affine.sites)
        return StepInputs(positions, slots, attentions, loras, affine)


def plan_step(shape: AttentionShape, table: TileTable | None, batch: Batch) -> StepInputs:
    """Plan a step, on the host. Without a table no request may have an adapter."""
    decodes = [request for request in batch.requests if request.count == 1]
    chunks = [request for request in batch.requests if request.count > 1]
    attention = []
    if decodes:
        attention.append(decode_attention(decodes))
    if chunks:
        first_blocks, blocks = _blocks(chunks)
        places = zip(first_blocks.tolist(), chunks, strict=True)
        cut = prefill_items(shape, [(first, r.start, r.count, r.position) for first, r in places])
        attention.append(AttentionWork(torch.from_numpy(cut), torch.from_numpy(blocks), None))
    num_rows = len(batch.positions)
    lora = []
    for requests, group_rows in ((decodes, DECODE_GROUP_ROWS), (chunks, PREFILL_GROUP_ROWS)):
        slots = adapter_slots(requests, num_rows)
        if slots is not None and table is not None:
            lora.append(plan_work(slots, table, group_rows=group_rows))
    positions = torch.from_numpy(batch.positions.astype(np.int32))
    works = _joined(lora)
    affine = None
    every = adapter_slots(batch.requests, num_rows) if works else None
    if every is not None and table is not None:
        affine = plan_affines(every, table, [site.adapted for site in works[0].sites])
    return StepInputs(positions, torch.from_numpy(batch.slots), tuple(attention), works, affine)


def decode_attention(decodes: Sequence[Rows]) -> AttentionWork:
    """Return the work of requests with one row each, on the host."""
    first_blocks, blocks = _blocks(decodes)
    rows = np.array([(request.start, request.position) for request in decodes], dtype=np.int64)
    items, row_items = decode_items(np.column_stack((first_blocks, rows)))
    return AttentionWork(torch.from_numpy(items), torch.from_numpy(blocks), torch.from_numpy(row_items))


def adapter_slots(requests: Sequence[Rows], num_rows: int) -> NDArray[np.int64] | None:
    """Return each row's adapter slot, -1 for rows without one or of other requests; None where no row has one."""
    slots: NDArray[np.int64] | None = None
    for request in requests:
        if request.adapter is None:
            continue
        if not isinstance(request.adapter, TableAdapter):
            raise TypeError(f"an adapter was placed for other kernels: {type(request.adapter).__name__}")
        if slots is None:
            slots = np.full(num_rows, -1, dtype=np.int64)
        slots[request.start : request.start + request.count] = request.adapter.slot
    return slots


def _blocks(requests: Sequence[Rows]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Put the requests' blocks one after the other; returns the place of each one's first, and all of them."""
    counts = np.array([len(request.block_ids) for request in requests], dtype=np.int64)
    ids = chain.from_iterable(request.block_ids for request in requests)
    return np.cumsum(counts) - counts, np.fromiter(ids, dtype=np.int32, count=int(counts.sum()))


def _joined(works: Sequence[StepWork]) -> tuple[StepWork, ...]:
    """Let every work's `adapted` count the rows of all: a consumer adds one delta, whoever wrote its rows."""
    if len(works) < 2:
        return tuple(works)
    adapted = [sum(site.adapted for site in sites) for sites in zip(*(work.sites for work in works), strict=True)]
    return tuple(
        replace(work, sites=tuple(replace(site, adapted=a) for site, a in zip(work.sites, adapted, strict=True)))
        for work in works
    )
