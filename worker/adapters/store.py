"""The worker's disk cache of adapters: content-addressed, verified, bounded.

`<folder>/<artifact digest>` holds a packed file whose SHA-256 is its name; `<folder>/.incoming` holds what is on its
way. However many ask for an artifact it is fetched once, as urgently as the most urgent of them wants it; the fetch is
cancelled when nobody waits any more. Idle artifacts are evicted in the order of `worker.engine.idle`, by bytes and the
seconds of a fetch, those on the device last; what is in use or kept never is.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

import structlog

from common.disk import is_full, sync_folder
from loraplex.digests import is_digest
from loraplex.errors import FailedPrecondition, LoraplexError, NoSpace
from loraplex.folder_lock import FolderLock
from worker.adapters.cached_files import CachedFile, CachedFiles, Stamp, verify
from worker.adapters.download import Partial, RetryPolicy, disk_error, download
from worker.adapters.full_disk import FullDisk
from worker.adapters.outside import NOTHING, Outside, outside_of
from worker.adapters.pace import Pace
from worker.adapters.places import Places
from worker.adapters.progress import Progress
from worker.adapters.room import Claims
from worker.adapters.source import ArtifactSource
from worker.engine.residency import FOR_REQUEST
from worker.mailbox import AdapterFile, Urgency

log = structlog.get_logger(__name__)

DEFAULT_PLACES: Final = 8
"""Downloads that get on at a time."""
_RETRY_AFTER_S: Final = 1.0

OnLate = Callable[[Progress, float], LoraplexError | None]
"""Told how far a fetch is, and the time by the store's clock; returns what its waiter is to raise, None to wait on."""


@dataclass(slots=True)
class _Fetch:
    """An artifact on its way, and who waits for it."""

    done: asyncio.Future[None]
    task: asyncio.Task[None] | None = None
    waiters: list[int] = field(default_factory=list)
    """How urgent it is to each."""
    reserved_bytes: int = 0
    progress: Progress = field(default_factory=Progress)

    def urgency(self) -> int:
        """How urgent it is: the lower goes first."""
        return min(self.waiters, default=Urgency.AHEAD)


@dataclass(slots=True)
class Lease:
    """The right to use a verified file until `release`, which may be called twice."""

    file: AdapterFile
    fetched: bool
    """It was not on the disk when it was asked for, or not as it should be."""
    waited: bool
    """It had to be fetched, or to be hashed before its use."""
    _release: Callable[[], None] = field(repr=False)
    _held: bool = True

    def release(self) -> None:
        """Give the file back; it may be evicted from now on."""
        if self._held:
            self._held = False
            self._release()


class AdapterStore:
    """Owns one cache folder while `async with` lasts.

    `on_change` hears the artifact digest of a file that comes, goes or is on its way, `on_fetched` how a fetch ended.
    `is_on_device` tells whether an artifact is on the device: such a file is evicted last. Raises FailedPrecondition on
    entering where another process owns the folder.
    """

    def __init__(
        self,
        folder: Path,
        source: ArtifactSource,
        *,
        budget_bytes: int,
        on_change: Callable[[str], None] = lambda _: None,
        is_on_device: Callable[[str], bool] = lambda _: False,
        on_fetched: Callable[[str, LoraplexError | None], None] = lambda *_: None,
        retry: RetryPolicy | None = None,
        places: Places | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._incoming = folder / ".incoming"
        self._source = source
        self._budget_bytes = budget_bytes
        self._on_change = on_change
        self._on_fetched = on_fetched
        self._retry = retry or RetryPolicy()
        self._places = places or Places(DEFAULT_PLACES)
        self._files = CachedFiles(folder, on_change=on_change, is_on_device=is_on_device)
        self._pace = Pace()
        self._clock = clock
        self._full_disk = FullDisk(folder)
        self._fetches: dict[str, _Fetch] = {}
        self._claims = Claims()
        self._freed = asyncio.Event()  # there may be room for another claim
        self._owned = AsyncExitStack()
        self._tasks: asyncio.TaskGroup | None = None

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as owned:
            try:
                lock = await asyncio.to_thread(self._open_folder)
            except OSError as error:
                raise disk_error(error, self._folder) from error
            owned.callback(os.close, lock)
            self._tasks = await owned.enter_async_context(asyncio.TaskGroup())
            owned.callback(self._cancel_fetches)
            self._owned = owned.pop_all()
        log.info("adapters.cache_opened", adapters=len(self._files), cached_bytes=self.cached_bytes)
        for artifact_digest in self._files:
            self._on_change(artifact_digest)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._owned.aclose()

    @property
    def cached_bytes(self) -> int:
        """Bytes of all files, without what is on its way."""
        return self._files.num_bytes

    @property
    def num_cached(self) -> int:
        """Files."""
        return len(self._files)

    @property
    def pace(self) -> Pace:
        """What fetches take; to be read only."""
        return self._pace

    @property
    def num_references(self) -> int:
        """Leases held and asked for."""
        return self._files.num_users

    def holds(self, artifact_digest: str) -> bool:
        """Tell whether the artifact is on the disk (perhaps not verified yet)."""
        return artifact_digest in self._files

    def is_usable(self, artifact_digest: str) -> bool:
        """Tell whether the artifact is on the disk, verified, and as it was then."""
        return self._files.usable(artifact_digest) is not None

    def size_bytes(self, artifact_digest: str) -> int | None:
        """Return the bytes of a file, or None where it is not on the disk."""
        entry = self._files.find(artifact_digest)
        return None if entry is None else entry.size_bytes

    def outside(self, artifact_digest: str) -> Outside:
        """Return what of a verified file does not go into the arena; nothing where that is not known."""
        entry = self._files.find(artifact_digest)
        return NOTHING if entry is None else entry.outside

    def is_fetching(self, artifact_digest: str) -> bool:
        """Tell whether an artifact is on its way from the source."""
        return artifact_digest in self._fetches and artifact_digest not in self._files

    def left_s(self, artifact_digest: str) -> float | None:
        """Return the seconds that a fetch under way still takes, None where there is none or no byte has come."""
        fetch = self._fetches.get(artifact_digest)
        return None if fetch is None else fetch.progress.left_s(self._clock())

    def stay(self, artifact_digest: str) -> Callable[[], None]:
        """Have a fetch that is under way go on, whoever leaves it, until the returned function is called, once."""
        fetch = self._fetches.get(artifact_digest)
        if fetch is None:
            return lambda: None
        self._join(fetch, Urgency.AHEAD)
        return lambda: self._leave(artifact_digest, fetch, Urgency.AHEAD)

    async def acquire(
        self,
        artifact_digest: str,
        urgency: int = FOR_REQUEST,
        *,
        within_s: float | None = None,
        on_late: OnLate = lambda *_: None,
    ) -> Lease:
        """Return a lease on the verified file, fetching it if need be.

        `urgency` is FOR_REQUEST or an `Urgency`. `on_late` is called when the file has not come within so many seconds,
        and again after as many, while the fetch still has its waiter. Raises what that returns, ArtifactNotFound,
        ArtifactUnreachable, CorruptArtifact or NoSpace. A caller that is cancelled leaves the fetch to those who still
        wait.
        """
        self._files.use(artifact_digest)
        before, waited = self._files.find(artifact_digest), False
        try:
            entry = self._files.usable(artifact_digest)
            while entry is None or entry.stamp is None:
                waited = True
                await self._wait_for(artifact_digest, urgency, within_s, on_late)
                entry = self._files.find(artifact_digest)  # hashed a moment ago, whoever may touch it all the time
        except BaseException:
            self._release(artifact_digest)
            raise
        entry.uses += 1
        path = str(self._folder / artifact_digest)
        file = AdapterFile(artifact_digest, path, entry.size_bytes, *entry.outside)
        return Lease(file, entry is not before, waited, lambda: self._release(artifact_digest))

    def keep(self, artifact_digest: str, *, kept: bool) -> None:
        """Have room counted for a file for good, or no longer; who keeps it holds a lease besides."""
        self._files.keep(artifact_digest, kept=kept)
        self._freed.set()

    def remove(self, artifact_digest: str) -> None:
        """Delete a file, if it is there. Raises FailedPrecondition while somebody uses it or waits for it."""
        if self._files.is_used(artifact_digest):
            raise FailedPrecondition("the adapter's file is in use on this worker; try again later")
        if artifact_digest in self._files:
            self._drop(artifact_digest)

    def distrust(self, artifact_digest: str) -> None:
        """Hash the file anew before its next use: someone found it unreadable."""
        entry = self._files.find(artifact_digest)
        if entry is not None:
            entry.stamp = None

    async def recheck(self, artifact_digest: str) -> bool:
        """Hash a file that someone found unreadable; returns whether it is as it should be. One that is not is gone.

        False for the first one, too, who may have read a damaged file that has been replaced.
        """
        entry = self._files.find(artifact_digest)
        if entry is None:
            return False
        if entry.replaced_damaged:
            entry.replaced_damaged = False
            return False
        path = self._folder / artifact_digest
        try:
            if await asyncio.to_thread(verify, path, artifact_digest, entry.size_bytes) is not None:
                return True
        except OSError:
            return True  # as far as is known
        if self._files.find(artifact_digest) is entry and artifact_digest not in self._fetches:
            self._drop(artifact_digest)
        return False

    async def _wait_for(self, artifact_digest: str, urgency: int, within_s: float | None, on_late: OnLate) -> None:
        fetch = self._fetches.get(artifact_digest)
        if fetch is None:
            if self._tasks is None:
                raise RuntimeError("the store is used outside of `async with`")
            fetch = self._fetches[artifact_digest] = _Fetch(asyncio.get_running_loop().create_future())
            fetch.task = self._tasks.create_task(self._run(artifact_digest, fetch))
            self._on_change(artifact_digest)
        self._join(fetch, urgency)
        try:
            while not fetch.done.done():
                limit = asyncio.timeout(within_s)
                try:
                    async with limit:
                        await asyncio.shield(fetch.done)
                except TimeoutError:
                    if not limit.expired():
                        raise
                    if not fetch.done.done() and (error := on_late(fetch.progress, self._clock())) is not None:
                        raise error from None
            fetch.done.result()
        finally:
            self._leave(artifact_digest, fetch, urgency)

    def _join(self, fetch: _Fetch, urgency: int) -> None:
        fetch.waiters.append(urgency)
        self._urgency_changed()

    def _leave(self, artifact_digest: str, fetch: _Fetch, urgency: int) -> None:
        fetch.waiters.remove(urgency)
        if not fetch.waiters and not fetch.done.done():
            self._forget(artifact_digest, fetch)
            fetch.done.cancel()
            if fetch.task is not None:
                fetch.task.cancel()
        self._urgency_changed()

    def _urgency_changed(self) -> None:
        self._places.serve()
        self._freed.set()

    async def _run(self, artifact_digest: str, fetch: _Fetch) -> None:
        """Bring an artifact, and tell those who wait how it went."""
        error: Exception | None = None
        try:
            await self._bring(artifact_digest, fetch)
            self._on_fetched(artifact_digest, None)
        except LoraplexError as refused:
            error = refused
        except OSError as broken:
            error = disk_error(broken, self._folder)
        except Exception as unexpected:
            log.exception("artifact.fetch_broke", artifact=artifact_digest[:12])
            error = unexpected
        finally:
            self._forget(artifact_digest, fetch)
        if isinstance(error, LoraplexError):
            self._on_fetched(artifact_digest, error)
        if not fetch.done.done():
            if error is None:
                fetch.done.set_result(None)
            else:
                fetch.done.set_exception(error)
                fetch.done.exception()  # seen, even where the last waiter has just left

    def _forget(self, artifact_digest: str, fetch: _Fetch) -> None:
        fetch.reserved_bytes = 0
        if self._fetches.get(artifact_digest) is fetch:
            del self._fetches[artifact_digest]
        self._freed.set()
        self._on_change(artifact_digest)

    async def _bring(self, artifact_digest: str, fetch: _Fetch) -> None:
        target = self._folder / artifact_digest
        entry = self._files.find(artifact_digest)
        is_damaged = entry is not None
        if entry is not None:
            stamp = await asyncio.to_thread(verify, target, artifact_digest, entry.size_bytes)
            if stamp is not None:
                entry.outside = await asyncio.to_thread(outside_of, target)
                entry.stamp = stamp
                return
            log.warning("artifact.corrupt_on_disk", artifact=artifact_digest[:12], what_now="it is fetched anew")
            self._drop(artifact_digest)

        async def fetched() -> Partial:
            scratch = self._incoming / f"{artifact_digest[:16]}.{secrets.token_hex(4)}"
            progress = fetch.progress
            async with self._places.take(fetch.urgency) as place:
                progress.begin(self._clock())

                async def reserve(size_bytes: int) -> None:
                    progress.pause(size_bytes, self._clock())
                    await self._make_room(size_bytes, fetch, place.give_up)
                    progress.go_on(self._clock())

                def got(num_bytes: int) -> None:
                    progress.got(num_bytes, self._clock())
                    place.get_on()

                return await download(
                    self._source,
                    artifact_digest,
                    scratch,
                    reserve=reserve,
                    retry=self._retry,
                    on_bytes=got,
                    on_failure=progress.fail,
                )

        if not self._files.can_leave:  # else there is room to be made
            self._full_disk.check(self._clock())
        try:
            partial = await fetched()
        except OSError as error:
            size_bytes, fetch.reserved_bytes = fetch.reserved_bytes, 0
            if not is_full(error):
                raise
            # What is on the device goes on being asked for, and could not be had again here.
            if not self._files.evict(max(size_bytes, 1), spare_device=True):
                raise self._full_disk.met(self._clock()) from error
            log.warning("artifact.disk_full", artifact=artifact_digest[:12], what_now="idle adapters made room")
            try:
                partial = await fetched()
            except OSError as again:
                if not is_full(again):
                    raise
                raise self._full_disk.met(self._clock()) from again
        self._full_disk.over()
        seconds = fetch.progress.seconds(self._clock())
        try:
            outside = await asyncio.to_thread(outside_of, partial.path)
            partial.path.replace(target)  # no await from here to the entry: a file is never there without it
            stamp = Stamp.of(target.stat())
        except BaseException:
            await asyncio.to_thread(partial.close)
            raise
        self._pace.add(partial.size_bytes, seconds)
        file = CachedFile(partial.size_bytes, stamp, seconds, outside, replaced_damaged=is_damaged)
        self._files.add(artifact_digest, file)
        fetch.reserved_bytes = 0
        log.info("artifact.fetched", artifact=artifact_digest[:12], size_bytes=partial.size_bytes)
        await asyncio.to_thread(sync_folder, self._folder)

    async def _make_room(self, size_bytes: int, fetch: _Fetch, on_wait: Callable[[], None]) -> None:
        """Evict until `size_bytes` fit, waiting for its turn and for files in use. Raises NoSpace."""
        self._check_fits(size_bytes)
        claim = self._claims.add(size_bytes, fetch.urgency)
        try:
            while self._claims.next(self._room_bytes()) is not claim:
                on_wait()
                self._freed.clear()
                await self._freed.wait()  # ends: each file in use and not kept is held by a request that ends
                self._check_fits(size_bytes)
            self._claims.take(claim)
            self._files.evict(size_bytes - self._free_bytes())
            fetch.reserved_bytes = size_bytes
        finally:
            self._claims.drop(claim)
            self._freed.set()

    def _check_fits(self, size_bytes: int) -> None:
        """Refuse what would not fit if all were idle but what is kept."""
        kept_bytes = self._files.kept_bytes
        limit = self._budget_bytes - kept_bytes
        if size_bytes > limit:
            beside = " beside those pinned" if kept_bytes else ""
            raise NoSpace(
                f"the adapter has {size_bytes} bytes, the worker's cache takes {limit}{beside}; raise cache_bytes",
                retry_after_s=_RETRY_AFTER_S if size_bytes <= self._budget_bytes else None,
                limit=limit,
                length=size_bytes,
            )

    def _free_bytes(self) -> int:
        reserved = sum(fetch.reserved_bytes for fetch in self._fetches.values())
        return self._budget_bytes - self.cached_bytes - reserved

    def _room_bytes(self) -> int:
        """Bytes that are free, or would be without the idle files."""
        return self._free_bytes() + self._files.idle_bytes

    def _drop(self, artifact_digest: str) -> None:
        """Delete a file; the room of one in use is free as well then."""
        self._files.drop(artifact_digest)
        self._freed.set()

    def _release(self, artifact_digest: str) -> None:
        if self._files.release(artifact_digest):
            self._freed.set()

    def _cancel_fetches(self) -> None:
        for fetch in list(self._fetches.values()):
            if fetch.task is not None:
                fetch.task.cancel()
            fetch.done.cancel()

    def _open_folder(self) -> int:
        """Lock the folder, throw away leftovers, list the files. Returns the lock, an open file."""
        lock = FolderLock(
            self._folder,
            "the adapter cache",
            "give each worker a cache folder of its own with --cache-dir",
            "cache_dir",
            file_name=".lock",
        ).take()
        try:
            self._incoming.mkdir(exist_ok=True)
            for leftover in self._incoming.iterdir():
                leftover.unlink(missing_ok=True)
            files = [(file.stat(), file.name) for file in self._folder.iterdir() if is_digest(file.name)]
        except OSError:
            os.close(lock)
            raise
        for facts, name in sorted(files, key=lambda entry: (entry[0].st_mtime_ns, entry[1])):
            fetch_s = self._pace.expected_s(facts.st_size)
            self._files.add(name, CachedFile(facts.st_size, None, fetch_s=fetch_s))
        return lock
