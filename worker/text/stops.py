"""Stop strings: where a growing text ends, however it was cut into pieces.

The first stop string is the one that is complete first, reading character by character; of two that are complete at
the same character, the longer one. The answer therefore does not depend on token borders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cut:
    """Text that may be shown now, and the stop string that ended it, if one did."""

    text: str
    stop: str | None = None


def _failure_links(pattern: str) -> list[int]:
    """Return, per prefix length, the length of its longest proper suffix that is also a prefix (Knuth-Morris-Pratt)."""
    links = [0, 0]
    matched = 0
    for character in pattern[1:]:
        while matched and pattern[matched] != character:
            matched = links[matched]
        matched += pattern[matched] == character
        links.append(matched)
    return links


class StopFinder:
    """Watches one text for stop strings, holding back what may be the beginning of one.

    Takes constant time per character and stop string. After a stop was found nothing more comes out.
    """

    __slots__ = ("_held", "_links", "_matched", "_stopped", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("a stop string is empty")
        self._stops = tuple(sorted(dict.fromkeys(stops), key=len, reverse=True))  # the longer wins a tie
        self._links = [_failure_links(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> Cut:
        """Add text; return what may be shown, without what may yet turn out to be a stop string."""
        if self._stopped:
            return Cut("")
        if not self._stops:
            return Cut(text)
        whole = self._held + text
        for end in range(len(self._held), len(whole)):
            stop = self._step(whole[end])
            if stop is not None:
                self._stopped = True
                self._held = ""
                return Cut(whole[: end + 1 - len(stop)], stop)
        held = max(self._matched)
        self._held = whole[len(whole) - held :]
        return Cut(whole[: len(whole) - held])

    def flush(self) -> str:
        """Return what was held back: the text has ended and it was no stop string."""
        text, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return text

    def _step(self, character: str) -> str | None:
        found = None
        for at, (stop, links) in enumerate(zip(self._stops, self._links, strict=True)):
            matched = self._matched[at]
            while matched and stop[matched] != character:
                matched = links[matched]
            matched += stop[matched] == character
            if matched == len(stop):
                found = found or stop
                matched = links[matched]
            self._matched[at] = matched
        return found
