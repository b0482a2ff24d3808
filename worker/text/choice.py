"""The text of one choice: detokenizer, stop strings and min_tokens together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from worker.text.detokenizer import Detokenizer
from worker.text.stops import StopFinder
from worker.text.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Piece:
    """What some tokens added: text to show, how many of the tokens count, the stop string that ended the choice."""

    text: str
    num_tokens: int
    stop: str | None = None


class ChoiceText:
    """Turns the tokens of one choice into the text a client sees.

    Stop strings are not looked for in the text of the first `min_tokens` tokens. The token that completes a stop
    string is the last that counts.
    """

    __slots__ = ("_detokenizer", "_min_tokens", "_seen_tokens", "_stops")

    def __init__(self, vocabulary: Vocabulary, stops: Sequence[str], min_tokens: int) -> None:
        self._detokenizer = Detokenizer(vocabulary)
        self._stops = StopFinder(stops)
        self._min_tokens = min_tokens
        self._seen_tokens = 0

    def push(self, token_ids: Sequence[int]) -> Piece:
        """Add tokens; those after a stop string are dropped."""
        parts: list[str] = []
        for count, token_id in enumerate(token_ids, start=1):
            self._seen_tokens += 1
            text = self._detokenizer.push(token_id)
            if self._seen_tokens <= self._min_tokens:
                parts.append(text)
                continue
            cut = self._stops.push(text)
            parts.append(cut.text)
            if cut.stop is not None:
                return Piece("".join(parts), count, cut.stop)
        return Piece("".join(parts), len(token_ids))

    def finish(self) -> Piece:
        """Return what was still held back: the choice has ended."""
        cut = self._stops.push(self._detokenizer.flush())
        if cut.stop is not None:
            return Piece(cut.text, 0, cut.stop)
        return Piece(cut.text + self._stops.flush(), 0)
