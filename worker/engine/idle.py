"""The order in which idle things leave, on the device, in host memory and on the disk alike.

Lowest priority first, by (seconds to restore) x (probability of reuse) per unit of room. The probability is estimated
as in GreedyDual-Size-Frequency (Cherkasova, 1998): by the number of uses, and by recency through a level that every
eviction raises to the priority of what left, and that is added to the priority of whatever is used afterwards. So
frequent things last longer, and nothing lasts for ever. No clock is needed.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Hashable
from typing import Generic, TypeVar

_SLACK = 64

Member = TypeVar("Member", bound=Hashable)


def worth(seconds: float, uses: int, room: float) -> float:
    """Return what keeping something saves, per unit of the `room` that it takes: its priority above the level."""
    return seconds * uses / max(1.0, room)


class Level:
    """How much of what leaves was worth so far; shared by all that compete for one room."""

    def __init__(self) -> None:
        self.value = 0.0

    def rise(self, priority: float) -> None:
        """Note the priority of something that leaves."""
        self.value = max(self.value, priority)


class IdleOrder(Generic[Member]):
    """Members; the lowest priority leaves first, of equals the one that was added first."""

    def __init__(self) -> None:
        self._members: dict[Member, tuple[float, int]] = {}  # member -> (priority, order of addition)
        self._heap: list[tuple[float, int, Member]] = []  # with entries of members that left or were added anew
        self._added = 0

    def add(self, member: Member, priority: float) -> None:
        """Put a member in that is not here."""
        self._added += 1
        self._members[member] = (priority, self._added)
        if len(self._heap) > _SLACK + 4 * len(self._members):
            self._heap = [(*order, other) for other, order in self._members.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (priority, self._added, member))

    def discard(self, member: Member) -> None:
        """Take a member out, if it is here."""
        self._members.pop(member, None)

    def least(self, skip: Container[Member] = ()) -> tuple[float, Member] | None:
        """Return (priority, member) of the one that leaves first, but for those in `skip`."""
        skipped: list[tuple[float, int, Member]] = []
        found: tuple[float, Member] | None = None
        while self._heap:
            priority, added, member = self._heap[0]
            if self._members.get(member) != (priority, added):
                heapq.heappop(self._heap)
            elif member in skip:
                skipped.append(heapq.heappop(self._heap))
            else:
                found = (priority, member)
                break
        for entry in skipped:
            heapq.heappush(self._heap, entry)
        return found

    def priority(self, member: Member) -> float:
        """Return a member's priority."""
        return self._members[member][0]

    def in_order(self) -> list[Member]:
        """Return all members, the one that leaves first first."""
        return sorted(self._members, key=self._members.__getitem__)

    def __contains__(self, member: Member) -> bool:
        return member in self._members

    def __len__(self) -> int:
        return len(self._members)
