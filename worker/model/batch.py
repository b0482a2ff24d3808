"""From a step's plan to the tensors the decoder reads: rows, positions, cache slots, attention groups, adapter groups.

Rows are ordered by adapter, so that each adapter's rows are one slice at every site of every layer. Pure layout: it
decides nothing about who runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np
import torch
from torch import Tensor

from worker.engine.plan import BASE_SLOT, SequenceStep
from worker.kernels.layout import AttentionPlan, Chunk, DecodeGroup, LayerFactors, LoraGroup
from worker.model.decoder import Rows

MAX_PADDING: Final = 2
"""A decode group's longest sequence has at most this many times the blocks of its shortest."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step as tensors, and where its sampled requests' logits lie."""

    rows: Rows
    sampled: tuple[SequenceStep, ...]
    """The sequences that choose a token, in the plan's order."""
    sampled_rows: Tensor
    """[S] int64: the last row of each."""


@dataclass(frozen=True, slots=True)
class _Placed:
    sequence: SequenceStep
    start: int


def build_step(
    sequences: Sequence[SequenceStep],
    adapter_of: Callable[[int], tuple[LayerFactors, ...]],
    *,
    block_tokens: int,
    device: torch.device,
) -> Step:
    """Lay out a step; `adapter_of` returns the factors in a slot, called once per distinct adapter."""
    placed: list[_Placed] = []
    start = 0
    for sequence in sorted(sequences, key=lambda sequence: sequence.adapter_slot):
        placed.append(_Placed(sequence, start))
        start += len(sequence.token_ids)
    last_row = {p.sequence.request_id: p.start + len(p.sequence.token_ids) - 1 for p in placed}
    sampled = tuple(sequence for sequence in sequences if sequence.sample)
    positions = [p.sequence.position + offset for p in placed for offset in range(len(p.sequence.token_ids))]
    slots = [
        p.sequence.block_ids[position // block_tokens] * block_tokens + position % block_tokens
        for p in placed
        for position in range(p.sequence.position, p.sequence.position + len(p.sequence.token_ids))
    ]
    rows = Rows(
        token_ids=_tensor([token for p in placed for token in p.sequence.token_ids], device),
        positions=_tensor(positions, device),
        attention=AttentionPlan(
            slots=_tensor(slots, device),
            chunks=tuple(_chunk(p, device) for p in placed if len(p.sequence.token_ids) > 1),
            decodes=_decode_groups([p for p in placed if len(p.sequence.token_ids) == 1], block_tokens, device),
        ),
        lora=_lora_groups(placed, adapter_of),
    )
    return Step(rows, sampled, _tensor([last_row[sequence.request_id] for sequence in sampled], device))


def _lora_groups(
    placed: Sequence[_Placed], adapter_of: Callable[[int], tuple[LayerFactors, ...]]
) -> tuple[LoraGroup, ...]:
    groups = []
    for slot, members in groupby(placed, key=lambda p: p.sequence.adapter_slot):
        if slot == BASE_SLOT:
            continue
        first, *rest = members
        last = rest[-1] if rest else first
        groups.append(LoraGroup(first.start, last.start + len(last.sequence.token_ids), adapter_of(slot)))
    return tuple(groups)


def _chunk(placed: _Placed, device: torch.device) -> Chunk:
    sequence = placed.sequence
    count, position = len(sequence.token_ids), sequence.position
    visible = None
    if position:
        visible = torch.ones(count, position + count, dtype=torch.bool, device=device).tril_(position)
    return Chunk(placed.start, placed.start + count, position, _tensor(sequence.block_ids, device), visible)


def _decode_groups(placed: Sequence[_Placed], block_tokens: int, device: torch.device) -> tuple[DecodeGroup, ...]:
    """Group by length, so that a long sequence does not make all others gather as many blocks."""
    by_length = sorted(placed, key=lambda p: len(p.sequence.block_ids))
    groups: list[DecodeGroup] = []
    start = 0
    while start < len(by_length):
        limit = MAX_PADDING * len(by_length[start].sequence.block_ids)
        end = start
        while end < len(by_length) and len(by_length[end].sequence.block_ids) <= limit:
            end += 1
        groups.append(_decode_group(by_length[start:end], block_tokens, device))
        start = end
    return tuple(groups)


def _decode_group(members: Sequence[_Placed], block_tokens: int, device: torch.device) -> DecodeGroup:
    width = len(members[-1].sequence.block_ids)
    blocks = np.zeros((len(members), width), dtype=np.int64)
    for index, member in enumerate(members):
        blocks[index, : len(member.sequence.block_ids)] = member.sequence.block_ids
    lengths = np.array([member.sequence.position + 1 for member in members], dtype=np.int64)
    beyond = np.arange(width * block_tokens) >= lengths[:, None, None]
    return DecodeGroup(
        rows=_tensor([member.start for member in members], device),
        blocks=torch.from_numpy(blocks.reshape(-1)).to(device),
        lengths=torch.from_numpy(lengths).to(device),
        beyond=torch.from_numpy(beyond).to(device),
    )


def _tensor(values: Iterable[int], device: torch.device) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64, device=device)
