"""A step's rows whose adapter has an embedding or a head of its own.

Owns the order of operations at both ends of the model for them. Every row is computed as it would be alone: products
are the backend's, by which rows do not depend on each other, and what is left is elementwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from worker.kernels.interface import StepKernels
from worker.kernels.layout import Batch
from worker.kernels.linear import Linear
from worker.kernels.vocabulary import HeadChange, VocabularyChange
from worker.model.device import send


@dataclass(frozen=True, slots=True)
class _Span:
    """Neighbouring rows of one adapter."""

    start: int
    end: int
    change: VocabularyChange


class VocabularyStep:
    """What adapters change of the embedding and the head in one step."""

    def __init__(self, step: StepKernels, batch: Batch) -> None:
        self._step = step
        self._spans = _spans(batch)
        self._num_rows = len(batch.token_ids)

    def embed(self, residual: Tensor, token_ids: Tensor) -> None:
        """Make the adapters' embeddings of what the base's embedding gave, in place.

        residual [T, hidden], an operator's result; token_ids [T] int64 on the device.
        """
        self._step.finish()
        added: list[tuple[_Span, Tensor]] = []
        for span in self._spans:
            own = span.change.embedding
            if own is None:
                continue
            tokens = token_ids[span.start : span.end]
            if own.matrix is not None:
                residual[span.start : span.end] = own.matrix[tokens].to(residual.dtype)
            if own.down is not None and own.up is not None:
                added.append((span, self._step.linear(own.up, own.down[tokens].to(residual.dtype))))
        if added:
            self._step.finish()
        for span, delta in added:
            residual[span.start : span.end] += delta
        for span in self._spans:
            if span.change.embedding is not None and span.change.embedding.affine is not None:
                rows = residual[span.start : span.end]
                rows.copy_(span.change.embedding.affine.apply(rows))

    def logits(self, head: Linear, x: Tensor, rows: NDArray[np.int64]) -> Tensor:
        """Return the logits [S, vocabulary] of normed rows x [S, hidden], an operator's result; they are computed.

        rows [S] says which of the step's rows they are.
        """
        step = self._step
        step.finish()
        groups = self._groups(rows)
        on_base = np.ones(len(rows), dtype=bool)
        for places, own in groups:
            on_base[places] = own.matrix is None
        if on_base.all():
            logits = step.linear(head, x)
            products = []
        else:
            logits = x.new_empty(len(rows), head.out_features)
            base_places = np.flatnonzero(on_base)
            linears = [(base_places, head)] if len(base_places) else []
            linears += [(places, own.matrix) for places, own in groups if own.matrix is not None]
            products = [(send(places, x.device), linear) for places, linear in linears]
        results = [(places, step.linear(linear, x[places])) for places, linear in products]
        added = []
        for places, own in groups:
            if own.down is not None and own.up is not None:
                at = send(places, x.device)
                added.append((at, step.linear(own.up, step.linear(own.down, x[at]))))
        step.finish()
        for at, result in results:
            logits[at] = result
        for at, delta in added:
            logits[at] += delta
        for places, own in groups:
            if own.affine is not None:
                at = send(places, x.device)
                logits[at] = own.affine.apply(logits[at])
        return logits

    def _groups(self, rows: NDArray[np.int64]) -> list[tuple[NDArray[np.int64], HeadChange]]:
        """Return the adapters with a head of their own, each with where its rows are among `rows`."""
        groups = []
        for span in self._spans:
            places = np.flatnonzero((rows >= span.start) & (rows < span.end))
            if span.change.head is not None and len(places):
                groups.append((places, span.change.head))
        return groups


def _spans(batch: Batch) -> list[_Span]:
    spans: list[_Span] = []
    for request in batch.requests:
        change = None if request.adapter is None else request.adapter.vocabulary
        if change is None:
            continue
        end = request.start + request.count
        if spans and spans[-1].change is change and spans[-1].end == request.start:
            spans[-1] = _Span(spans[-1].start, end, change)
        else:
            spans.append(_Span(request.start, end, change))
    return spans
