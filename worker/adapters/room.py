"""Who gets the disk cache's room next. Pure: how much there is, is an argument."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

MAX_PASSED: Final = 8
"""As many of equal urgency go before one that does not fit yet; then they wait for it."""


@dataclass(slots=True, eq=False)
class Claim:
    """Room that is waited for. Its urgency may change meanwhile: the lower goes first."""

    size_bytes: int
    urgency: Callable[[], int]
    passed: int = 0


class Claims:
    """Who waits for room. What does not fit yet lets a few of its equals go first, and no one who is less urgent."""

    def __init__(self) -> None:
        self._claims: list[Claim] = []  # in the order in which they came

    def add(self, size_bytes: int, urgency: Callable[[], int]) -> Claim:
        """Wait for so many bytes, until `take` or `drop`."""
        claim = Claim(size_bytes, urgency)
        self._claims.append(claim)
        return claim

    def next(self, room_bytes: int) -> Claim | None:
        """Return whose turn it is, with so much room; None where all must wait for more."""
        ahead: Claim | None = None
        for claim in self._in_order():
            if ahead is not None and claim.urgency() > ahead.urgency():
                return None
            if claim.size_bytes <= room_bytes:
                return claim
            if claim.passed >= MAX_PASSED:
                return None
            ahead = ahead or claim
        return None

    def take(self, claim: Claim) -> None:
        """Note that a claim has got its room."""
        for other in self._in_order():
            if other is claim:
                break
            other.passed += 1
        self._claims.remove(claim)

    def drop(self, claim: Claim) -> None:
        """Forget a claim, if it has not got its room."""
        if claim in self._claims:
            self._claims.remove(claim)

    def _in_order(self) -> list[Claim]:
        return sorted(self._claims, key=lambda claim: claim.urgency())
