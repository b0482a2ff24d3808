"""What two artifacts of an adapter say comes next, compared position by position: the same token, and how far apart.

Owns how a comparison becomes rows of a step, and the arithmetic. Log probabilities and divergences are float32.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.engine.plan import ComparedPositions, ComparisonStep, SequenceStep
from worker.model.batch import Step

_EXACT: Final = -1
_MEASURED: Final = -2
"""Ids of a comparison's two sequences in a step; requests have none below 0."""
_ROWS: Final = 16
"""Positions compared at a time: a few hundred kilobytes each with large vocabularies."""


def comparison_sequences(comparison: ComparisonStep) -> tuple[SequenceStep, SequenceStep]:
    """Return what a step computes for a comparison: the same tokens under either artifact."""
    exact = (comparison.exact_block_ids, comparison.exact_slot)
    measured = (comparison.measured_block_ids, comparison.measured_slot)
    return (
        SequenceStep(_EXACT, comparison.token_ids, 0, *exact, sample=False),
        SequenceStep(_MEASURED, comparison.token_ids, 0, *measured, sample=False),
    )


def comparison_rows(comparison: ComparisonStep, step: Step) -> NDArray[np.int64]:
    """Return the rows [2 P] whose logits are compared: those of P positions under the exact artifact come first."""
    positions = np.arange(comparison.first_position, len(comparison.token_ids))
    return np.concatenate([step.first_rows[_EXACT] + positions, step.first_rows[_MEASURED] + positions])


def compare_logits(logits: Tensor) -> ComparedPositions:
    """Compare logits [2 P, vocab] float32, those of P positions under the exact artifact first.

    KL(exact || measured) = sum of p (log p - log q) over the vocabulary, in nats. Rounding can take it a little below
    0, which it never is; then it is 0. Logits that are not finite give values that are not.
    """
    exact, measured = logits.chunk(2)
    same: list[bool] = []
    divergences: list[float] = []
    for start in range(0, len(exact), _ROWS):
        p_logits, q_logits = exact[start : start + _ROWS], measured[start : start + _ROWS]
        same += (p_logits.argmax(dim=-1) == q_logits.argmax(dim=-1)).tolist()
        log_p, log_q = p_logits.log_softmax(dim=-1), q_logits.log_softmax(dim=-1)
        kl = (log_p.exp() * (log_p - log_q)).sum(dim=-1)
        divergences += torch.where(kl < 0, torch.zeros_like(kl), kl).tolist()
    return ComparedPositions(tuple(same), tuple(divergences))
