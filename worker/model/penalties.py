"""What changes logits before a token is chosen: biases, the minimum length, and penalties on what was already said.

Owns the tokens each request has seen. Repetition penalty (CTRL; as in transformers and vLLM): the logit of every token
of prompt or answer is divided by it where positive, multiplied where negative. Frequency and presence penalties
(OpenAI): count · frequency + presence is taken off the logit of every token of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.mailbox import Sampling
from worker.model.device import send


class SeenTokens:
    """The distinct tokens of one request, prompt and answer, and how often each is in the answer."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        distinct = np.unique(np.array(prompt_token_ids, dtype=np.int64))
        self._size = len(distinct)
        self._ids = np.concatenate((distinct, np.zeros(64, dtype=np.int64)))
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._index = {token: index for index, token in enumerate(distinct.tolist())}

    @property
    def ids(self) -> NDArray[np.int64]:
        """Distinct token ids."""
        return self._ids[: self._size]

    @property
    def answer_counts(self) -> NDArray[np.float32]:
        """Occurrences of each id in the answer."""
        return self._counts[: self._size]

    def add(self, token_id: int) -> None:
        """Note a generated token."""
        index = self._index.setdefault(token_id, self._size)
        if index == self._size:
            if index == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[index] = token_id
            self._size += 1
        self._counts[index] += 1


@dataclass(frozen=True, slots=True)
class PenaltyRow:
    """A row of logits that penalties apply to."""

    row: int
    seen: SeenTokens
    sampling: Sampling


def has_penalties(sampling: Sampling) -> bool:
    """Whether any penalty differs from doing nothing."""
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0


def apply_penalties(logits: Tensor, rows: Sequence[PenaltyRow]) -> None:
    """Penalise logits [S, vocab] in place, all rows in one gather and scatter; repetition first."""
    if not rows:
        return
    width = logits.shape[1]
    sizes = [len(row.seen.ids) for row in rows]

    def spread(values: list[float]) -> Tensor:
        return send(np.repeat(np.array(values, dtype=np.float32), sizes), logits.device)

    flat = send(np.concatenate([row.seen.ids + row.row * width for row in rows]), logits.device)
    counts = send(np.concatenate([row.seen.answer_counts for row in rows]), logits.device)
    repetition = spread([row.sampling.repetition_penalty for row in rows])
    frequency = spread([row.sampling.frequency_penalty for row in rows])
    presence = spread([row.sampling.presence_penalty for row in rows])
    seen = logits.view(-1)[flat]
    seen = torch.where(seen > 0, seen / repetition, seen * repetition)
    seen -= counts * frequency + (counts > 0) * presence
    logits.view(-1)[flat] = seen


def apply_biases(logits: Tensor, rows: Sequence[tuple[int, Sequence[tuple[int, float]]]]) -> None:
    """Add biases to logits [S, vocab] in place: (row, ((token id, bias), …)); -inf forbids a token."""
    entries = [(row * logits.shape[1] + token, bias) for row, biases in rows for token, bias in biases]
    if not entries:
        return
    flat = send(np.array([index for index, _ in entries], dtype=np.int64), logits.device)
    values = send(np.array([bias for _, bias in entries], dtype=np.float32), logits.device)
    logits.view(-1).index_put_((flat,), values, accumulate=True)
