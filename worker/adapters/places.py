"""How many downloads get on at a time: the most urgent first, and one that stands still holds up nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from worker.adapters.progress import PATIENCE_S
from worker.mailbox import Urgency


@dataclass(slots=True, eq=False)
class _Turn:
    """A download that waits for a place. Its urgency may change meanwhile."""

    urgency: Callable[[], int]
    come: asyncio.Future[None]
    granted: bool = False


class Places:
    """`limit` places. A download that gets no byte for `patience_s` gives its place up, and goes on without one.

    The lower urgency goes first, of equals who came first. Where there are several, the last free place is for who is
    waited for: what is brought ahead may take long.
    """

    def __init__(self, limit: int, *, patience_s: float = PATIENCE_S) -> None:
        self._free = limit
        self._spare = min(1, limit - 1)
        self._patience_s = patience_s
        self._turns: list[_Turn] = []  # in the order in which they came

    @property
    def num_free(self) -> int:
        """Places that nobody has."""
        return self._free

    @asynccontextmanager
    async def take(self, urgency: Callable[[], int]) -> AsyncIterator[Place]:
        """Wait for a place and have it for as long as the block lasts, and gets on."""
        turn = _Turn(urgency, asyncio.get_running_loop().create_future())
        self._turns.append(turn)
        self.serve()
        try:
            await turn.come
        except asyncio.CancelledError:
            if turn.granted:
                self._give_back()
            else:
                self._turns.remove(turn)
            raise
        place = Place(self._give_back)
        place.watch(self._patience_s)
        try:
            yield place
        finally:
            place.give_up()

    def serve(self) -> None:
        """Give free places to who is next; to be called when an urgency has changed."""
        while self._turns:
            turn = min(self._turns, key=lambda turn: turn.urgency())
            if self._free <= (0 if turn.urgency() <= Urgency.ASKED else self._spare):
                return
            self._free -= 1
            self._turns.remove(turn)
            turn.granted = True
            if not turn.come.done():  # else it was cancelled just now, and gives the place back
                turn.come.set_result(None)

    def _give_back(self) -> None:
        self._free += 1
        self.serve()


class Place:
    """A download's place."""

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back = give_back
        self._held = True
        self._got_on = False
        self._timer: asyncio.TimerHandle | None = None

    def get_on(self) -> None:
        """Note that bytes came."""
        self._got_on = True

    def watch(self, patience_s: float) -> None:
        """Give the place up as soon as no bytes have come for so long."""
        self._got_on = False
        self._timer = asyncio.get_running_loop().call_later(patience_s, self._check, patience_s)

    def give_up(self) -> None:
        """Give the place to the next, once."""
        if self._timer is not None:
            self._timer.cancel()
        if self._held:
            self._held = False
            self._give_back()

    def _check(self, patience_s: float) -> None:
        if self._got_on:
            self.watch(patience_s)
        else:
            self.give_up()
