"""How many downloads get on at a time: first come, first served, and one that stands still holds up nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

PATIENCE_S: Final = 2.0


class Places:
    """`limit` places. A download that gets no byte for `patience_s` gives its place up, and goes on without one."""

    def __init__(self, limit: int, *, patience_s: float = PATIENCE_S) -> None:
        self._free = asyncio.Semaphore(limit)
        self._patience_s = patience_s

    @asynccontextmanager
    async def take(self) -> AsyncIterator[Place]:
        """Wait for a place and have it for as long as the block lasts, and gets on."""
        await self._free.acquire()
        place = Place(self._free)
        place.watch(self._patience_s)
        try:
            yield place
        finally:
            place.give_up()


class Place:
    """A download's place."""

    def __init__(self, free: asyncio.Semaphore) -> None:
        self._free = free
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
            self._free.release()

    def _check(self, patience_s: float) -> None:
        if self._got_on:
            self.watch(patience_s)
        else:
            self.give_up()
