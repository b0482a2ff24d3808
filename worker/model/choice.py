"""Draws tokens from logits: temperature, min-p, top-k and top-p, then one uniform number per row.

Filters apply in the order min-p, top-k, top-p, each to what the one before left, as vLLM does; tokens as likely as the
last one kept are kept too. The draw walks the kept tokens in order of their ids, so that it depends on their
probabilities alone: not on how many candidates were looked at, nor on which of two near-equal logits sorts first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.mailbox import Sampling
from worker.model.device import send

PRESELECT: Final = (256, 4096)
"""Sizes of the candidate lists tried before all of the vocabulary is sorted."""


@dataclass(frozen=True, slots=True)
class Filters:
    """Filters of R rows, each [R, 1] on the logits' device."""

    top_k: Tensor
    """int64; the vocabulary's size where there is no bound."""
    top_p: Tensor
    log_min_p: Tensor
    """-inf where there is no bound."""

    @classmethod
    def of(cls, samplings: Sequence[Sampling], vocab_size: int, device: torch.device) -> Filters:
        """Return the filters of each row's parameters."""
        top_k = [s.top_k if 0 < s.top_k < vocab_size else vocab_size for s in samplings]
        log_min_p = [float(np.log(s.min_p)) if s.min_p > 0 else -np.inf for s in samplings]
        return cls(
            send(np.array(top_k, dtype=np.int64), device)[:, None],
            send(np.array([s.top_p for s in samplings], dtype=np.float32), device)[:, None],
            send(np.array(log_min_p, dtype=np.float32), device)[:, None],
        )

    def rows(self, index: Tensor) -> Filters:
        """Return the filters of some rows."""
        return Filters(self.top_k[index], self.top_p[index], self.log_min_p[index])


def is_filtered(sampling: Sampling) -> bool:
    """Whether any filter can drop a token."""
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


def draw(logits: Tensor, samplings: Sequence[Sampling], uniforms: NDArray[np.float64]) -> Tensor:
    """Choose one token id per row: logits [R, vocab] float32 (overwritten), temperatures above 0; returns [R] int64."""
    device = logits.device
    temperature = send(np.array([s.temperature for s in samplings], dtype=np.float32), device)[:, None]
    # The largest logit becomes 0 before the division, so that no temperature overflows.
    scaled = logits.sub_(logits.amax(dim=-1, keepdim=True)).div_(temperature)
    uniform = send(uniforms, device)
    filtered = [row for row, sampling in enumerate(samplings) if is_filtered(sampling)]
    if not filtered:
        return _walk(scaled.exp(), uniform)
    chosen = torch.empty(len(samplings), dtype=torch.int64, device=device)
    free = [row for row, sampling in enumerate(samplings) if not is_filtered(sampling)]
    if free:
        index = send(np.array(free), device)
        chosen[index] = _walk(scaled[index].exp(), uniform[index])
    index = send(np.array(filtered), device)
    filters = Filters.of([samplings[row] for row in filtered], logits.shape[1], device)
    some = scaled[index] if free else scaled
    chosen[index] = _draw_filtered(some, filters, uniform[index])
    return chosen


def _draw_filtered(scaled: Tensor, filters: Filters, uniform: Tensor) -> Tensor:
    """Look at the likeliest candidates first, and at more only for the rows whose filters they do not settle."""
    rows, vocab_size = scaled.shape
    chosen = torch.empty(rows, dtype=torch.int64, device=scaled.device)
    mass = scaled.exp().sum(dim=-1, keepdim=True).double()
    pending = torch.arange(rows, device=scaled.device)
    for size in (*(size for size in PRESELECT if size < vocab_size), vocab_size):
        values, ids = scaled[pending].topk(size, dim=-1)
        kept, settled = _keep(values, filters.rows(pending), mass[pending], vocab_size)
        done = pending[settled]
        weights = values[settled].exp().masked_fill_(~kept[settled], 0.0)
        by_id = ids[settled].argsort(dim=-1)
        position = _walk(weights.gather(1, by_id), uniform[done])[:, None]
        chosen[done] = ids[settled].gather(1, by_id.gather(1, position))[:, 0]
        pending = pending[~settled]
        if not len(pending):
            break
    return chosen


def _keep(values: Tensor, filters: Filters, mass: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Which candidates survive, [R, size] bool, and for which rows that is certain, [R] bool.

    `values` [R, size] are log weights, likeliest first and 0 at most; `mass` [R, 1] is the whole vocabulary's weight.
    """
    size = values.shape[1]
    has_top_k = filters.top_k < vocab_size
    kth_listed = has_top_k & (filters.top_k <= size)
    kth_value = values.gather(1, filters.top_k.clamp(max=size) - 1)
    threshold = torch.where(kth_listed, kth_value.maximum(filters.log_min_p), filters.log_min_p)
    bounded = values >= threshold
    ends_inside = ~bounded[:, -1:]  # then nothing beyond the list passes min-p and top-k
    weights = values.exp().double() * bounded
    everything = ends_inside | (size == vocab_size)
    total = torch.where(everything, weights.sum(dim=-1, keepdim=True), mass)
    before = weights.cumsum(dim=-1) - weights
    nucleus = bounded & ((before < filters.top_p * total) | (filters.top_p >= 1))
    last = (nucleus.sum(dim=-1, keepdim=True) - 1).clamp(min=0)
    kept = bounded & (values >= values.gather(1, last))
    # The total is right, and the last candidate is dropped: so is everything beyond it, ties included.
    whole = ~has_top_k & torch.isneginf(filters.log_min_p)
    certain = (ends_inside | whole) & ~kept[:, -1:] | (size == vocab_size)
    return kept, certain[:, 0]


def _walk(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return the index at which the running sum of weights [R, n] passes uniform · total; never one of weight 0."""
    sums = weights.cumsum(dim=-1, dtype=torch.float64)
    total = sums[:, -1]
    target = (uniform * total).minimum(torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(sums, target[:, None], right=True)[:, 0].clamp_(max=weights.shape[1] - 1)
