"""A bounded number of places; whoever finds none waits for a while and is then refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from loraplex.errors import ResourceExhausted


class Turns:
    """Places for `what` (a plural); `patience_s` is how long one is waited for."""

    def __init__(self, num_places: int, patience_s: float, what: str) -> None:
        self._places = asyncio.Semaphore(num_places)
        self._num_places = num_places
        self._patience_s = patience_s
        self._what = what

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Hold a place. Raises ResourceExhausted."""
        try:
            async with asyncio.timeout(self._patience_s):
                await self._places.acquire()
        except TimeoutError as error:
            raise ResourceExhausted(f"too many {self._what} at a time; try again later", retry_after_s=1.0) from error
        try:
            yield
        finally:
            self._places.release()

    async def ended(self) -> None:
        """Wait until all places are free, and take them for good."""
        for _ in range(self._num_places):
            await self._places.acquire()
