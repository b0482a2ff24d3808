"""The newest revision this process knows, and the wake-up of those who wait for the next one."""

from __future__ import annotations

import asyncio
import sys


class HeadSignal:
    """Holds a revision that only rises; wakes all waiters when it does, or when it closes."""

    def __init__(self) -> None:
        self._revision = 0
        self._closed = False
        self._changed = asyncio.Event()

    @property
    def revision(self) -> int:
        """The newest revision known."""
        return self._revision

    @property
    def closed(self) -> bool:
        """True once the service is going down."""
        return self._closed

    def advance(self, revision: int) -> None:
        """Tell that a transaction was committed. Older news is ignored."""
        if revision > self._revision:
            self._revision = revision
            self._wake()

    def close(self) -> None:
        """Wake all waiters for good."""
        self._closed = True
        self._wake()

    async def wait_beyond(self, revision: int, timeout_s: float) -> bool:
        """Wait until a newer revision than this is known. False after `timeout_s` or where the signal closed."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._revision <= revision and not self._closed:
                    await self._changed.wait()
        except TimeoutError:
            return False
        return self._revision > revision

    async def wait_closed(self, timeout_s: float) -> None:
        """Wait until the signal closes, at most `timeout_s`."""
        await self.wait_beyond(sys.maxsize, timeout_s)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()  # the next wait is for the next change
