"""From a step's plan to the rows that kernels compute.

Rows are ordered by adapter, so that each adapter's rows are neighbours at every site of every layer. Pure layout: it
decides nothing about who runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worker.engine.plan import BASE_SLOT, PENDING, SequenceStep
from worker.kernels.layout import BLOCK_TOKENS, Batch, PendingTokens, Rows
from worker.kernels.tiles import PlacedAdapter
from worker.model.device import send
from worker.model.scores import Chosen


@dataclass(frozen=True, slots=True)
class Step:
    """A step's rows, and where its sampled requests' logits lie."""

    batch: Batch
    sampled: tuple[SequenceStep, ...]
    """The sequences that choose a token, in the order of their rows."""
    sampled_rows: NDArray[np.int64]
    """[S] the last row of each."""
    first_rows: dict[int, int]
    """The first row of every sequence, by request id."""


def build_step(
    sequences: Sequence[SequenceStep], adapter_in: Callable[[int], PlacedAdapter], before: Chosen | None = None
) -> Step:
    """Lay out a step; `adapter_in` returns a slot's adapter, and is called once per distinct one.

    `before` are the tokens that the step before chooses; KeyError for a pending one that is not among them.
    """
    adapters = {slot: adapter_in(slot) for slot in {sequence.adapter_slot for sequence in sequences} - {BASE_SLOT}}
    requests: list[Rows] = []
    tokens: list[int] = []
    first_row: dict[int, int] = {}
    last_row: dict[int, int] = {}
    for sequence in sorted(sequences, key=lambda sequence: sequence.adapter_slot):
        adapter = adapters.get(sequence.adapter_slot)
        count = len(sequence.token_ids)
        requests.append(Rows(len(tokens), count, sequence.position, sequence.block_ids, adapter))
        first_row[sequence.request_id] = len(tokens)
        tokens += sequence.token_ids
        last_row[sequence.request_id] = len(tokens) - 1
    positions = np.concatenate([np.arange(r.position, r.position + r.count) for r in requests])
    blocks = np.concatenate(
        [np.array(r.block_ids)[np.arange(r.position, r.position + r.count) // BLOCK_TOKENS] for r in requests]
    )
    # In the order of rows: where all are sampled, as in most steps, there is nothing to gather.
    sampled = tuple(sorted((s for s in sequences if s.sample), key=lambda s: last_row[s.request_id]))
    return Step(
        Batch(
            np.array(tokens),
            positions,
            blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS,
            tuple(requests),
            _pending(sequences, last_row, before),
            any(adapter.vocabulary is not None for adapter in adapters.values()),
        ),
        sampled,
        np.array([last_row[sequence.request_id] for sequence in sampled], dtype=np.int64),
        first_row,
    )


def _pending(
    sequences: Sequence[SequenceStep], last_row: Mapping[int, int], before: Chosen | None
) -> PendingTokens | None:
    requests = [sequence.request_id for sequence in sequences if sequence.token_ids[-1] == PENDING]
    if not requests:
        return None
    if before is None:
        raise KeyError(f"the step before has chosen no token for request {requests[0]}")
    places = np.array([[last_row[request] for request in requests], [before.places[request] for request in requests]])
    rows, sources = send(places, before.tokens.device)
    return PendingTokens(rows, before.tokens[sources])
