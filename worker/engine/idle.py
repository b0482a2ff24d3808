"""The order in which idle things leave: a priority queue whose members may be taken out again at any time."""

from __future__ import annotations

import heapq
from collections.abc import Container

_SLACK = 64


class IdleOrder:
    """Members by number; the lowest priority leaves first, of equals the one that was added first."""

    def __init__(self) -> None:
        self._members: dict[int, tuple[float, int]] = {}  # member -> (priority, order of addition)
        self._heap: list[tuple[float, int, int]] = []  # with entries of members that left or were added anew
        self._added = 0

    def add(self, member: int, priority: float) -> None:
        """Put a member in that is not here."""
        self._added += 1
        self._members[member] = (priority, self._added)
        if len(self._heap) > _SLACK + 4 * len(self._members):
            self._heap = [(*order, other) for other, order in self._members.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (priority, self._added, member))

    def discard(self, member: int) -> None:
        """Take a member out, if it is here."""
        self._members.pop(member, None)

    def least(self, skip: Container[int] = ()) -> tuple[float, int] | None:
        """Return (priority, member) of the one that leaves first, but for those in `skip`."""
        skipped: list[tuple[float, int, int]] = []
        found: tuple[float, int] | None = None
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

    def priority(self, member: int) -> float:
        """Return a member's priority."""
        return self._members[member][0]

    def in_order(self) -> list[int]:
        """Return all members, the one that leaves first first."""
        return sorted(self._members, key=self._members.__getitem__)

    def __contains__(self, member: int) -> bool:
        return member in self._members

    def __len__(self) -> int:
        return len(self._members)
