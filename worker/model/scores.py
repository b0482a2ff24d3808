"""What the model says of the next tokens, and which are chosen."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Scores:
    """Of S rows, on the device."""

    logits: Tensor
    """[S, vocab] float32."""
    largest: Tensor
    """[S] float32, each row's largest logit; NaN if it has one."""
    likeliest: Tensor
    """[S] int64, the token of the largest logit; any, where that is NaN."""

    @classmethod
    def of(cls, logits: Tensor) -> Scores:
        """Return the scores that logits, [S, vocab] float32, amount to."""
        return cls(logits, logits.amax(dim=-1), logits.argmax(dim=-1))

    def first(self, count: int) -> Scores:
        """Return those of the first rows."""
        return Scores(self.logits[:count], self.largest[:count], self.likeliest[:count])


@dataclass(frozen=True, slots=True)
class Chosen:
    """The tokens that a step chooses, on the device, which may have yet to compute them."""

    tokens: Tensor
    """[S] int64."""
    places: dict[int, int]
    """Where in `tokens`, by request id."""
