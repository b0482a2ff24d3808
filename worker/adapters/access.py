"""How whoever needs an adapter comes to its verified file: within a deadline, and of the version it was resolved to."""

from __future__ import annotations

import asyncio
from typing import Final

from loraplex.errors import ArtifactUnreachable, LoraplexError
from worker.adapters.store import AdapterStore, Lease
from worker.adapters.versions import Versions
from worker.deadline import time_to_wait
from worker.requests import CheckedAdapter

UNHURRIED_S: Final = 600.0
"""How long who gives no deadline waits for an adapter."""


class AdapterAccess:
    """Leases of adapters' files."""

    def __init__(self, store: AdapterStore, versions: Versions) -> None:
        self._store = store
        self._versions = versions

    async def acquire(self, adapter: CheckedAdapter, remaining_s: float | None) -> Lease:
        """Lease an adapter's file, leaving time to say so where it does not come before the caller's deadline.

        Raises what the store does, ArtifactUnreachable at the deadline, and VersionMismatch.
        """
        digest = adapter.artifact_digest
        try:
            async with asyncio.timeout(UNHURRIED_S if remaining_s is None else time_to_wait(remaining_s)):
                lease = await self._store.acquire(digest)
        except TimeoutError:
            raise ArtifactUnreachable(
                f"adapter artifact {digest[:12]} is not cached here and did not come within the request's deadline; "
                "try again later",
                artifact_digest=digest,
            ) from None
        try:
            await self._versions.check(lease.file, adapter.version_digest)
        except (LoraplexError, asyncio.CancelledError):
            lease.release()
            raise
        return lease
