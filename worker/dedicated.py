"""A worker for one adapter: which one, its file, and the refusal of everything else.

The engine folds the adapter into the base's weights as it loads them, so to it the adapter's requests are the base's.
What was loaded stays until the worker ends, whatever the adapter's name comes to mean meanwhile.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Final

import structlog

from common.backoff import Backoff
from loraplex.errors import FailedPrecondition, LoraplexError, NoSpace, NotServedHere, Unavailable
from worker.adapters.store import AdapterStore, Lease

log = structlog.get_logger(__name__)

_RETRY: Final = Backoff(first_s=0.5, longest_s=10.0)


class Dedication:
    """The artifact that a worker is for; `fetch` holds its file from then on."""

    def __init__(self, artifact_digest: str, store: AdapterStore) -> None:
        self.artifact_digest = artifact_digest
        self._store = store
        self._lease: Lease | None = None

    @property
    def is_fetched(self) -> bool:
        """Whether the file is there."""
        return self._lease is not None

    async def fetch(self) -> Path:
        """Return the artifact's verified file, however long its source cannot be reached or the disk is full.

        Raises ArtifactNotFound, CorruptArtifact, NoSpace for what the cache is too small for, and what else waiting
        does not change.
        """
        failures = 0
        while self._lease is None:
            try:
                self._lease = await self._store.acquire(self.artifact_digest)
            except LoraplexError as error:
                if not _passes(error):
                    raise
                failures += 1
                pause_s = _RETRY.jittered_s(failures, random.Random())  # noqa: S311 - jitter, not a secret
                pause_s = max(pause_s, error.retry_after_s or 0.0)
                log.warning("dedicated.waiting", artifact=self.artifact_digest[:12], reason=error.message)
                await asyncio.sleep(pause_s)
        return Path(self._lease.file.path)

    def release(self) -> None:
        """Let go of the file, once no engine is started again."""
        if self._lease is not None:
            self._lease.release()

    def check(self, artifact_digest: str | None) -> None:
        """Raise NotServedHere unless a request is for the adapter; None asks the base."""
        if artifact_digest == self.artifact_digest:
            return
        asked = "the base" if artifact_digest is None else f"adapter artifact {artifact_digest[:12]}"
        raise NotServedHere(
            f"this worker serves adapter artifact {self.artifact_digest[:12]} only, not {asked}; another worker may",
            dedicated_artifact_digest=self.artifact_digest,
        )

    def check_unload(self, artifact_digest: str) -> None:
        """Raise FailedPrecondition for the adapter itself."""
        if artifact_digest == self.artifact_digest:
            raise FailedPrecondition(
                "the worker is dedicated to the adapter and has it merged until it ends", field="artifact_digest"
            )


def _passes(error: LoraplexError) -> bool:
    """Tell whether waiting may help. A full disk says when to try again; a cache that is too small does not."""
    return isinstance(error, Unavailable) or (isinstance(error, NoSpace) and error.retry_after_s is not None)
