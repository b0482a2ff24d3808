"""What is to be drawn: each row's filters and its uniform number, as kernels take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from worker.mailbox import Sampling


@dataclass(frozen=True, slots=True)
class Draws:
    """R rows of logits and how each is drawn from.

    Filters apply in the order min-p, top-k, top-p, each to what the one before left; what is as likely as the last one
    kept is kept too. Then the first token, in order of ids, at which the kept weights' running sum passes uniform ·
    their total, is the one.
    """

    rows: NDArray[np.int64]
    """[R] rows of the logits."""
    temperature: NDArray[np.float64]
    """[R] above 0."""
    top_k: NDArray[np.int64]
    """[R]; 0 for no bound."""
    top_p: NDArray[np.float64]
    """[R]; 1 for no bound."""
    min_p: NDArray[np.float64]
    """[R]; 0 for no bound."""
    uniform: NDArray[np.float64]
    """[R] in [0, 1)."""

    @classmethod
    def of(cls, rows: Sequence[int], samplings: Sequence[Sampling], uniforms: NDArray[np.float64]) -> Draws:
        """Return the draws of R rows of the logits by their requests' parameters, all of temperatures above 0."""
        return cls(
            rows=np.array(rows, dtype=np.int64),
            temperature=np.array([sampling.temperature for sampling in samplings]),
            top_k=np.array([max(sampling.top_k, 0) for sampling in samplings], dtype=np.int64),
            top_p=np.array([sampling.top_p for sampling in samplings]),
            min_p=np.array([sampling.min_p for sampling in samplings]),
            uniform=uniforms,
        )


@runtime_checkable
class Drawing(Protocol):
    """Kernels that draw."""

    def draw(self, logits: Tensor, draws: Draws) -> Tensor:
        """Return the drawn tokens, [R] int64 where the logits are: one for each of the draws' rows.

        Any, where a logit is NaN. logits [S, vocab] float32 may be overwritten.
        """
        ...
