"""How whoever needs an adapter comes to its verified file: within a deadline, of the right version, out of quarantine.

Hears of every fetch and load, so that an adapter that fails is refused at once for a while, and of nobody else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextvars import Context
from typing import Final

import structlog

from loraplex.errors import ArtifactUnreachable, DeadlineUnreachable, LoraplexError
from worker.adapters.pace import Pace
from worker.adapters.progress import Progress
from worker.adapters.quarantine import Quarantine, Stage
from worker.adapters.store import AdapterStore, Lease
from worker.adapters.versions import UNREADABLE_FILE, Versions
from worker.deadline import time_to_wait
from worker.engine.residency import FOR_REQUEST
from worker.mailbox import AdapterFile
from worker.requests import CheckedAdapter

log = structlog.get_logger(__name__)

UNHURRIED_S: Final = 600.0
"""How long who gives no deadline waits for an adapter, and on unless its source gives nothing."""
_RETRY_AFTER_S: Final = 1.0
_LONGEST_RETRY_S: Final = 300.0


class AdapterAccess:
    """Leases of adapters' files. `on_change` hears of an adapter whose quarantine has changed.

    `bring` is told of an adapter whose fetch outlasts who waits for it, before they leave it; it has the fetch go on
    in the background, and returns whether it does.
    """

    def __init__(
        self,
        store: AdapterStore,
        versions: Versions,
        on_change: Callable[[str], None],
        bring: Callable[[CheckedAdapter], bool],
    ) -> None:
        self._store = store
        self._versions = versions
        self._on_change = on_change
        self._bring = bring
        self.quarantine = Quarantine(on_change)
        self._loads = Pace()

    async def acquire(
        self,
        adapter: CheckedAdapter,
        remaining_s: float | None,
        urgency: int = FOR_REQUEST,
        *,
        try_now: bool = False,
    ) -> Lease:
        """Lease an adapter's file, leaving time to say so where it does not come before the caller's deadline.

        Raises at once what an adapter in quarantine failed with, unless it is to be tried now; else what the store
        does, DeadlineUnreachable at the deadline, ArtifactUnreachable there if its source gives nothing, and
        VersionMismatch.
        """
        digest = adapter.artifact_digest
        if not try_now:
            self.quarantine.check(digest, time.monotonic())
        lease = await self._store.acquire(
            digest,
            urgency,
            within_s=UNHURRIED_S if remaining_s is None else time_to_wait(remaining_s),
            on_late=lambda progress, now: self._late(adapter, progress, now, has_deadline=remaining_s is not None),
        )
        try:
            await self._versions.check(lease.file, adapter.version_digest)
        except (LoraplexError, asyncio.CancelledError):
            lease.release()
            raise
        return lease

    def absent_file(self, adapter: CheckedAdapter) -> AdapterFile | None:
        """Return a file that is not on the disk, or not known to be as it should be, for who needs the adapter alone.

        None where it is there, or was never seen. A quarantine does not matter then: nothing is fetched. Raises
        VersionMismatch.
        """
        if self._store.is_usable(adapter.artifact_digest):
            return None
        return self._versions.recall(adapter.artifact_digest, adapter.version_digest)

    def expected_s(self, artifact_digest: str, artifact_bytes: int, *, fetch: bool) -> float | None:
        """Return the seconds it takes to bring an adapter from the disk to the device, and to `fetch` it before.

        None unless all of that has been measured.
        """
        if not self._loads.is_measured or (fetch and not self._store.pace.is_measured):
            return None
        seconds = self._loads.expected_s(artifact_bytes)
        if fetch:
            fetch_s, left_s = self._store.pace.expected_s(artifact_bytes), self._store.left_s(artifact_digest)
            seconds += fetch_s if left_s is None else min(fetch_s, left_s)
        return seconds

    def _late(
        self, adapter: CheckedAdapter, progress: Progress, now: float, *, has_deadline: bool
    ) -> LoraplexError | None:
        """Return what to tell who has waited for as long as they can; None where they may wait on."""
        digest = adapter.artifact_digest
        if progress.is_in_vain(now):
            return ArtifactUnreachable(
                f"adapter artifact {digest[:12]} is not cached here, and its source gave nothing of it before the "
                "deadline; try again later",
                artifact_digest=digest,
                retry_after_s=_RETRY_AFTER_S,
            )
        if not has_deadline:
            return None
        goes_on = self._bring(adapter)
        left_s = progress.left_s(now) or 0.0
        return DeadlineUnreachable(
            f"adapter artifact {digest[:12]} is not cached here and did not come whole before the deadline; "
            + ("it goes on coming, so try again" if goes_on else "try again later, or give more time"),
            retry_after_s=min(
                max(_RETRY_AFTER_S, left_s + self._loads.expected_s(adapter.artifact_bytes)), _LONGEST_RETRY_S
            ),
        )

    # What becomes of adapters.

    def fetched(self, artifact_digest: str, error: LoraplexError | None) -> None:
        """Note how a fetch ended."""
        if error is None:
            self.quarantine.worked(artifact_digest, Stage.FETCH)
        else:
            self._failed(artifact_digest, error, Stage.FETCH)

    def loaded(self, artifact_digest: str, num_bytes: int, seconds: float) -> None:
        """Note that an adapter was brought to the device, and what that took."""
        self._loads.add(num_bytes, seconds)
        self.quarantine.worked(artifact_digest, Stage.LOAD)

    async def load_failed(self, artifact_digest: str, error: LoraplexError) -> None:
        """Note that an adapter could not be brought to the device.

        Where its file has been damaged since it was verified, that is the disk's fault: it is fetched again then.
        """
        if error.reason in UNREADABLE_FILE and not await self._store.recheck(artifact_digest):
            log.warning("artifact.damaged_on_disk", artifact=artifact_digest[:12], what_now="it is fetched anew")
            return
        self._failed(artifact_digest, error, Stage.LOAD)

    def _failed(self, artifact_digest: str, error: LoraplexError, stage: Stage) -> None:
        pause_s = self.quarantine.failed(artifact_digest, error, stage, time.monotonic())
        if pause_s is not None:
            log.warning(
                "adapter.quarantined",
                artifact=artifact_digest[:12],
                stage=stage.value,
                reason=error.reason,
                for_s=round(pause_s, 2),
            )
            loop = asyncio.get_running_loop()
            loop.call_later(pause_s, self._on_change, artifact_digest, context=Context())
