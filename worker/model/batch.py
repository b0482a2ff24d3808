"""From a step's plan to the rows that kernels compute.

Rows are ordered by adapter, so that each adapter's rows are neighbours at every site of every layer. Pure layout: it
decides nothing about who runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worker.engine.plan import BASE_SLOT, SequenceStep
from worker.kernels.layout import BLOCK_TOKENS, Batch, Rows
from worker.kernels.tiles import PlacedAdapter


@dataclass(frozen=True, slots=True)
class Step:
    """A step's rows, and where its sampled requests' logits lie."""

    batch: Batch
    sampled: tuple[SequenceStep, ...]
    """The sequences that choose a token, in the plan's order."""
    sampled_rows: NDArray[np.int64]
    """[S] the last row of each."""

    def by_row(self) -> tuple[SequenceStep, ...]:
        """Return the sampled sequences in the order of their rows."""
        return tuple(self.sampled[index] for index in np.argsort(self.sampled_rows))


def build_step(sequences: Sequence[SequenceStep], adapter_in: Callable[[int], PlacedAdapter]) -> Step:
    """Lay out a step; `adapter_in` returns a slot's adapter, and is called once per distinct one."""
    adapters = {slot: adapter_in(slot) for slot in {sequence.adapter_slot for sequence in sequences} - {BASE_SLOT}}
    requests: list[Rows] = []
    tokens: list[int] = []
    last_row: dict[int, int] = {}
    for sequence in sorted(sequences, key=lambda sequence: sequence.adapter_slot):
        adapter = adapters.get(sequence.adapter_slot)
        count = len(sequence.token_ids)
        requests.append(Rows(len(tokens), count, sequence.position, sequence.block_ids, adapter))
        tokens += sequence.token_ids
        last_row[sequence.request_id] = len(tokens) - 1
    positions = np.concatenate([np.arange(r.position, r.position + r.count) for r in requests])
    blocks = np.concatenate(
        [np.array(r.block_ids)[np.arange(r.position, r.position + r.count) // BLOCK_TOKENS] for r in requests]
    )
    sampled = tuple(sequence for sequence in sequences if sequence.sample)
    return Step(
        Batch(np.array(tokens), positions, blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS, tuple(requests)),
        sampled,
        np.array([last_row[sequence.request_id] for sequence in sampled], dtype=np.int64),
    )
