"""What a worker is told to do about adapters ahead of requests: load, prefetch, unload, pin.

Owns the pins, with a lease on each pinned adapter's file, and the prefetches under way. Pins are the epoch's: they are
forgotten when the engine is lost, and routers send them again. Knows nothing of protobuf.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Final, Protocol, Self

import structlog

from common.backoff import Backoff
from loraplex.errors import (
    DeadlineUnreachable,
    EngineDown,
    FailedPrecondition,
    LoraplexError,
    QueueFull,
    ResourceExhausted,
)
from worker.adapters.access import UNHURRIED_S, AdapterAccess
from worker.adapters.late_file import LateFile
from worker.adapters.outside import Outside
from worker.adapters.store import AdapterStore
from worker.deadline import time_to_wait
from worker.engine_client import EngineClient
from worker.engine_orders import carry_out
from worker.mailbox import AdapterFile, Load, Pin, Unload, Urgency
from worker.requests import CheckedAdapter
from worker.status import Tier

log = structlog.get_logger(__name__)

MAX_PREFETCHES: Final = 64
_RETRY_AFTER_S: Final = 1.0
_BACKOFF: Final = Backoff(first_s=1.0, longest_s=300.0)


class Waiter(Protocol):
    """A request that waits for its adapter."""

    def give_up_waiting(self, error: LoraplexError) -> None:
        """End with an error, unless it has begun."""


class Steering:
    """Carries out what routers and operators want of adapters, while `async with` lasts.

    `where` tells an adapter's tier, None for nowhere; `num_users` how many requests use one; `on_change` hears of an
    adapter whose pin has changed.
    """

    def __init__(
        self,
        engine: EngineClient,
        store: AdapterStore,
        access: AdapterAccess,
        *,
        where: Callable[[str], Tier | None],
        num_users: Callable[[str], int],
        on_change: Callable[[str], None],
        backoff: Backoff = _BACKOFF,
    ) -> None:
        self._engine, self._store, self._access = engine, store, access
        self._where, self._num_users, self._on_change = where, num_users, on_change
        self._backoff = backoff
        self._pins: dict[str, asyncio.Task[None]] = {}  # each brings its adapter here and then holds its file
        self._pin_turn = asyncio.Lock()
        self._prefetches: dict[str, asyncio.Task[None]] = {}
        self._to_device: dict[str, Urgency] = {}  # of those that are prefetched
        self._tasks: asyncio.TaskGroup | None = None

    async def __aenter__(self) -> Self:
        self._tasks = await asyncio.TaskGroup().__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stop()
        tasks, self._tasks = self._tasks, None
        if tasks is not None:
            await tasks.__aexit__(None, None, None)

    @property
    def num_pinned(self) -> int:
        """Pinned adapters."""
        return len(self._pins)

    @property
    def num_leases(self) -> int:
        """Leases that pins hold or wait for."""
        return sum(not task.done() for task in self._pins.values())

    def is_pinned(self, artifact_digest: str) -> bool:
        """Tell whether an adapter is to be kept."""
        return artifact_digest in self._pins

    def stop(self) -> None:
        """Give up prefetches and pins: the worker goes away."""
        for prefetch in self._prefetches.values():
            prefetch.cancel()
        self.forget_pins()

    def forget_pins(self) -> None:
        """Keep nothing any more; to be called when the engine was lost."""
        for digest in list(self._pins):
            self._forget(digest)

    async def load(self, adapter: CheckedAdapter, remaining_s: float | None) -> tuple[Tier, float]:
        """Bring an adapter to the device; returns where it was and the seconds it took.

        One in quarantine is tried at once: who asks for it may have mended what was wrong. Raises what leasing its file
        and the engine refuse with, and DeadlineUnreachable.
        """
        digest, began_s = adapter.artifact_digest, time.monotonic()
        tier = self._where(digest) or Tier.SOURCE
        if tier is Tier.DEVICE and self.absent_file(adapter) is not None:
            return tier, time.monotonic() - began_s
        lease = await self._access.acquire(adapter, remaining_s, Urgency.ASKED, try_now=True)
        try:
            left_s = UNHURRIED_S if remaining_s is None else time_to_wait(remaining_s) - (time.monotonic() - began_s)
            async with asyncio.timeout(left_s):
                await self._bring(lease.file, Urgency.ASKED)
        except TimeoutError:
            raise DeadlineUnreachable(
                f"adapter artifact {digest[:12]} is in this worker's cache, but did not find room on its device within "
                "the deadline; try again later, or unpin others",
                retry_after_s=_RETRY_AFTER_S,
            ) from None
        finally:
            lease.release()
        return tier, time.monotonic() - began_s

    def prefetch(self, adapter: CheckedAdapter, *, to_device: bool, for_request: bool = False) -> Tier:
        """Start to bring an adapter to the disk, or to the device if there is room; returns where it is now.

        `for_request` says that a request wants it that could not wait. A fetch that is under way goes on as this one's,
        whoever leaves it. Raises QueueFull where too many are under way.
        """
        digest = adapter.artifact_digest
        tier = self._where(digest) or Tier.SOURCE
        there = (Tier.DEVICE,) if to_device else (Tier.DEVICE, Tier.HOST, Tier.DISK)
        if tier in there:
            return tier
        urgency = Urgency.REFUSED if for_request else Urgency.AHEAD
        under_way = self._prefetches.get(digest)
        if under_way is not None and not under_way.done():
            if to_device:
                self._to_device[digest] = min(urgency, self._to_device.get(digest, urgency))
            return tier
        if len(self._prefetches) >= MAX_PREFETCHES:
            raise QueueFull(
                f"{MAX_PREFETCHES} adapters are being prefetched already; try again later",
                retry_after_s=_RETRY_AFTER_S,
                limit=MAX_PREFETCHES,
            )
        if to_device:
            self._to_device[digest] = urgency
        joined = self._store.is_fetching(digest)
        task = self._prefetches[digest] = self._start(lambda: self._prefetch(adapter, try_now=joined))
        leave = self._store.stay(digest)  # at once: the task has not begun
        task.add_done_callback(lambda _: self._prefetch_ended(digest, task, leave))
        return tier

    def bring(self, adapter: CheckedAdapter) -> bool:
        """Start to bring an adapter to the device for a request that cannot wait for it, so that it can come again.

        Returns whether it is under way.
        """
        if self._tasks is None:
            return False
        try:
            self.prefetch(adapter, to_device=True, for_request=True)
        except QueueFull:
            return False
        return True

    async def unload(self, artifact_digest: str, *, from_disk: bool) -> Tier | None:
        """Take an adapter off the device, and out of host memory and off the disk if asked; returns where it was.

        With its file what it failed with is forgotten: the next request fetches it anew. Raises FailedPrecondition
        while a request uses it or it is pinned.
        """
        if self.is_pinned(artifact_digest):
            raise FailedPrecondition("the adapter is pinned on this worker; unpin it first", field="artifact_digest")
        if self._num_users(artifact_digest):
            raise FailedPrecondition(
                "requests on this worker use the adapter; try again when they have ended", field="artifact_digest"
            )
        tier = self._where(artifact_digest)
        prefetch = self._prefetches.get(artifact_digest)
        if prefetch is not None:
            prefetch.cancel()
            await asyncio.wait([prefetch])
        await carry_out(self._engine, lambda order_id: Unload(order_id, artifact_digest, from_host=from_disk))
        if from_disk:
            self._store.remove(artifact_digest)
            self._access.quarantine.pardon(artifact_digest)
        return tier

    async def pin(self, adapter: CheckedAdapter, artifact_bytes: int) -> Tier:
        """Keep an adapter whatever the demand, and start to bring it here; returns where it is now.

        `artifact_bytes` is its size as far as the caller knows. Raises ResourceExhausted where pins leave no room.
        """
        digest = adapter.artifact_digest
        async with self._pin_turn:
            if digest not in self._pins:
                size_bytes = self._store.size_bytes(digest) or max(1, artifact_bytes)
                await self._reserve(digest, size_bytes, self._store.outside(digest))
                self._pins[digest] = self._start(lambda: self._keep(adapter))
                self._on_change(digest)
        return self._where(digest) or Tier.SOURCE

    async def unpin(self, artifact_digest: str) -> Tier | None:
        """Keep an adapter no longer; returns where it is."""
        async with self._pin_turn:
            if artifact_digest in self._pins:
                self._engine.unpin(artifact_digest)
                self._forget(artifact_digest)
        return self._where(artifact_digest)

    async def _reserve(self, artifact_digest: str, artifact_bytes: int, outside: Outside) -> None:
        epoch = self._engine.epoch
        try:
            await carry_out(self._engine, lambda order_id: Pin(order_id, artifact_digest, artifact_bytes, *outside))
        except asyncio.CancelledError:
            self._engine.unpin(artifact_digest)
            raise
        if self._engine.epoch != epoch:
            raise self._engine.down_error()

    def check_deadline(self, adapter: CheckedAdapter, remaining_s: float | None) -> None:
        """Refuse at once a request whose adapter cannot be on the device before its deadline, by what loads have taken.

        The adapter is brought all the same, so that the request can come again. Raises DeadlineUnreachable.
        """
        tier = self._where(adapter.artifact_digest)
        if remaining_s is None or tier is Tier.DEVICE:
            return
        num_bytes = self._store.size_bytes(adapter.artifact_digest) or adapter.artifact_bytes
        expected_s = self._access.expected_s(adapter.artifact_digest, num_bytes, fetch=tier is None)
        if expected_s is None or expected_s <= remaining_s:
            return
        goes_on = self.bring(adapter)
        raise DeadlineUnreachable(
            f"bringing the adapter to the device takes some {expected_s:.2g} s, and the deadline is in "
            f"{remaining_s:.2g} s; {'it is on its way now, so try again,' if goes_on else 'try again later,'} or give "
            "more time",
            retry_after_s=expected_s,
        )

    def limit_wait(
        self, waiter: Waiter, adapter: CheckedAdapter, remaining_s: float | None
    ) -> asyncio.TimerHandle | None:
        """Have a request that waits for its adapter be told before its deadline that it does not make it.

        Returns what to cancel when it ends.
        """
        digest = adapter.artifact_digest
        stays = self._where(digest) is Tier.DEVICE and self._store.holds(digest)
        if remaining_s is None or stays:  # it may leave before the request begins, but without its file it comes late
            return None
        size_bytes = self._store.size_bytes(digest) or adapter.artifact_bytes
        expected_s = self._access.expected_s(digest, size_bytes, fetch=False)
        error = DeadlineUnreachable(
            "the adapter did not come to the device, or the request to its turn, before the deadline; try again later",
            retry_after_s=max(_RETRY_AFTER_S, expected_s or 0.0),
        )
        return asyncio.get_running_loop().call_later(time_to_wait(remaining_s), waiter.give_up_waiting, error)

    def absent_file(self, adapter: CheckedAdapter) -> AdapterFile | None:
        """Return an adapter's file where only the engine is known to have it as it should be; else None: it is leased.

        What is submitted with it is to have a `late_file`. Raises VersionMismatch.
        """
        held = self._engine.adapters.get(adapter.artifact_digest)
        is_there = held is not None and not held.loading
        if not is_there and adapter.artifact_digest not in self._engine.on_host:
            return None
        return self._access.absent_file(adapter)

    def late_file(
        self, adapter: CheckedAdapter, remaining_s: Callable[[], float | None], fail: Callable[[LoraplexError], None]
    ) -> LateFile:
        """Return what brings an absent file to the engine if it asks; `fail` ends the request."""
        return LateFile(lambda: self._access.acquire(adapter, remaining_s()), self._start, self._engine.provide, fail)

    def load_failed(self, artifact_digest: str, error: LoraplexError) -> None:
        """Note that the engine could not load an adapter; what that means takes a while to find out."""
        self._start(lambda: self._access.load_failed(artifact_digest, error))

    async def _bring(self, file: AdapterFile, urgency: Urgency) -> None:
        await carry_out(self._engine, lambda order_id: Load(order_id, file, urgency))

    def _prefetch_ended(self, artifact_digest: str, task: asyncio.Task[None], leave: Callable[[], None]) -> None:
        leave()
        if self._prefetches.get(artifact_digest) is task:
            del self._prefetches[artifact_digest]
            self._to_device.pop(artifact_digest, None)

    async def _prefetch(self, adapter: CheckedAdapter, *, try_now: bool) -> None:
        try:
            lease = await self._access.acquire(adapter, None, Urgency.AHEAD, try_now=try_now)
            try:
                if (urgency := self._to_device.get(adapter.artifact_digest)) is not None:
                    await self._bring(lease.file, urgency)
            finally:
                lease.release()
        except LoraplexError as error:
            log.info("adapter.not_prefetched", artifact=adapter.artifact_digest[:12], reason=error.reason)

    async def _keep(self, adapter: CheckedAdapter) -> None:
        """Bring a pinned adapter to the device, trying for as long as it takes, and hold its file."""
        digest, failures, lease = adapter.artifact_digest, 0, None
        reserved = self._store.size_bytes(digest), self._store.outside(digest)
        try:
            while True:
                try:
                    lease = await self._access.acquire(adapter, None, Urgency.PINNED)
                    file = lease.file
                    sizes = file.artifact_bytes, Outside(file.outside_bytes, file.vocabulary_bytes)
                    if sizes != reserved:  # perhaps not what the caller believed
                        await self._reserve(digest, *sizes)
                        reserved = sizes
                    self._store.keep(digest, kept=True)
                    await self._bring(lease.file, Urgency.PINNED)
                    break
                except EngineDown:
                    return  # pins are forgotten with the epoch
                except ResourceExhausted as error:
                    log.warning("adapter.unpinned", artifact=digest[:12], why=error.message)
                    await self.unpin(digest)
                    return
                except LoraplexError as error:
                    failures += 1
                    pause_s = error.retry_after_s or self._backoff.pause_s(failures)
                    log.warning("adapter.pin_waits", artifact=digest[:12], reason=error.reason, again_in_s=pause_s)
                if lease is not None:
                    lease.release()
                    lease = None
                await asyncio.sleep(pause_s)
            await asyncio.get_running_loop().create_future()  # for ever: until it is unpinned
        finally:
            self._store.keep(digest, kept=False)
            if lease is not None:
                lease.release()

    def _forget(self, artifact_digest: str) -> None:
        self._pins.pop(artifact_digest).cancel()
        self._on_change(artifact_digest)

    def _start(self, begin: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        if self._tasks is None:
            raise RuntimeError("adapters are steered outside of `async with`")
        return self._tasks.create_task(_guarded(begin), context=Context())  # not of the call that began it


async def _guarded(begin: Callable[[], Awaitable[None]]) -> None:
    """Do background work whose failure is nobody's end; it may be ended before it has begun."""
    try:
        await begin()
    except Exception:
        log.exception("adapter.steering_broke")
