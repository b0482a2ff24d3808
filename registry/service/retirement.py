"""Artifacts that no version names any more, kept for a while for the downloads that are on their way to them.

A router that has not heard of the cutover yet, or a request that it resolved just before, still names the old artifact.
What is waiting when the registry stops is removed at its next start.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection
from typing import Never

import structlog

from loraplex.errors import LoraplexError
from registry.artifacts import ArtifactFolder
from registry.service.garbage import collect
from registry.store import Store

log = structlog.get_logger(__name__)


class Retirement:
    """Owns the artifacts that wait for their removal."""

    def __init__(self, store: Store, artifacts: ArtifactFolder, grace_s: float) -> None:
        self._store = store
        self._artifacts = artifacts
        self._grace_s = grace_s
        self._waiting: deque[tuple[float, frozenset[str]]] = deque()  # (due on the loop's clock, digests)
        self._more = asyncio.Event()

    def retire(self, digests: Collection[str]) -> None:
        """Remove those of the digests that no version names when the grace is over."""
        if digests:
            self._waiting.append((asyncio.get_running_loop().time() + self._grace_s, frozenset(digests)))
            self._more.set()

    async def run(self) -> Never:
        """Remove what is due, until cancelled."""
        while True:
            await self._more.wait()
            due, digests = self._waiting[0]
            await asyncio.sleep(due - asyncio.get_running_loop().time())
            # What was named and retired again meanwhile has a grace of its own.
            again = frozenset[str]().union(*(later for _, later in self._waiting if later is not digests))
            try:
                await collect(self._store, self._artifacts, digests - again)
            except LoraplexError:  # the database is away; the next start removes them
                log.warning("registry.artifacts_not_removed", count=len(digests), exc_info=True)
            self._waiting.popleft()
            if not self._waiting:
                self._more.clear()
