"""The file of an adapter that the engine had, and the disk had not, when a request came: brought if it is wanted.

The adapter may leave the device before the request begins, or while that was preempted. Then the engine asks, and the
request waits there, in nobody's way, until the file has come.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from loraplex.errors import LoraplexError
from worker.adapters.store import Lease
from worker.mailbox import AdapterFile


class LateFile:
    """One RPC's. Owns the fetch, and the lease that it ends with, until `close`."""

    def __init__(
        self,
        acquire: Callable[[], Awaitable[Lease]],
        begin: Callable[[Callable[[], Awaitable[None]]], asyncio.Task[None]],
        hand_over: Callable[[int, AdapterFile], None],
        fail: Callable[[LoraplexError], None],
    ) -> None:
        """`begin` starts background work; `hand_over` tells the engine a request's file; `fail` ends the RPC."""
        self._acquire, self._begin, self._hand_over, self._fail = acquire, begin, hand_over, fail
        self._wanted: list[int] = []
        self._task: asyncio.Task[None] | None = None
        self.lease: Lease | None = None
        """Once the file was wanted and is here."""
        self.fetch_s = 0.0
        """What that took."""

    def wanted(self, request_id: int) -> None:
        """Bring the file, once for all of the RPC's requests, and tell the engine."""
        self._wanted.append(request_id)
        if self.lease is not None:
            self._tell(self.lease)
        elif self._task is None:
            self._task = self._begin(self._bring)

    def close(self) -> None:
        """Give up the fetch and the file. Harmless twice."""
        if self._task is not None:
            self._task.cancel()
        if self.lease is not None:
            self.lease.release()

    async def _bring(self) -> None:
        asked_s = time.monotonic()
        try:
            lease = await self._acquire()
        except LoraplexError as error:
            self._fail(error)
            return
        except Exception:
            self._fail(LoraplexError("the adapter's file could not be brought; the worker's log says why"))
            raise
        self.lease = lease
        self.fetch_s = time.monotonic() - asked_s if lease.waited else 0.0
        self._tell(lease)

    def _tell(self, lease: Lease) -> None:
        wanted, self._wanted = self._wanted, []
        for request_id in wanted:
            self._hand_over(request_id, lease.file)
