"""What a worker tells of itself: one status value, assembled on demand, and the streams that follow it.

`StatusBoard` owns the sequence number and who is watching; the facts stay with their owners and are asked for when a
message goes out. Knows nothing of protobuf.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from worker.mailbox import AdapterOnDevice, EngineStatus, Ready

HEARTBEAT_S: Final = 1.0
MIN_INTERVAL_S: Final = 0.1


class State(Enum):
    """Where the worker is in its life."""

    STARTING = "starting"
    SERVING = "serving"
    NOT_SERVING = "not_serving"
    DRAINING = "draining"


class Tier(Enum):
    """Where an adapter is; the fastest tier that holds it whole."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    SOURCE = "source"


@dataclass(frozen=True, slots=True)
class AdapterStatus:
    """One adapter on this worker."""

    artifact_digest: str
    tier: Tier
    loading: bool
    in_flight: int
    artifact_bytes: int
    pinned: bool = False
    quarantine_reason: str = ""
    """Why requests for it are refused for now; empty where they are not."""
    quarantine_end_s: float = 0.0
    """Until when, in seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class TierUse:
    """How full a tier is."""

    used_bytes: int
    budget_bytes: int
    num_adapters: int
    max_adapters: int = 0
    """0 where only bytes bound it."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """Everything a worker tells of itself. Speeds in tokens per second; `adapters` by artifact digest."""

    worker_id: str
    epoch: str
    sequence: int
    state: State
    base_digest: str = ""
    running_requests: int = 0
    waiting_requests: int = 0
    queued_prefill_tokens: int = 0
    prefill_tokens_per_second: float = 0.0
    decode_tokens_per_second: float = 0.0
    free_blocks: int = 0
    total_blocks: int = 0
    block_tokens: int = 0
    max_context_tokens: int = 0
    device: str = ""
    dtype: str = ""
    base_quantization: str = ""
    """How the base's matrices are kept. This, `device` and `dtype` are empty while no engine is ready."""
    dedicated_artifact_digest: str = ""
    """Of the one adapter that is served; empty where any is."""
    kv_blocks: int = 0
    """Chunks that requests hold as KV blocks."""
    adapter_chunks: int = 0
    prefix_blocks: int = 0
    """Chunks of computed blocks that no request holds."""
    num_preempted: int = 0
    num_cached_tokens: int = 0
    adapters: Mapping[str, AdapterStatus] = field(default_factory=dict)
    tiers: Mapping[Tier, TierUse] = field(default_factory=dict)


_UNKNOWN: Final = EngineStatus(0, 0, 0, 0, 0.0, 0.0)


def adapter_status(
    artifact_digest: str,
    *,
    cached_bytes: int | None,
    fetching: bool,
    in_flight: int,
    held: AdapterOnDevice | None,
    on_host: bool = False,
    pinned: bool = False,
    quarantine: tuple[str, float] | None = None,
) -> AdapterStatus | None:
    """Return where an adapter is, or None if it is neither on the disk nor on the device, and nobody wants it.

    `quarantine` is why it is refused and until when, in seconds since the epoch.

    `cached_bytes` is its size on the disk, None where it is not there; `held` what the engine says of it. One that the
    engine is still loading counts as on the disk. What its file could not be fetched for refuses nobody while the
    engine has it.
    """
    if cached_bytes is None and held is None and not (on_host or fetching or in_flight or pinned or quarantine):
        return None
    if held is not None and not held.loading:
        tier, loading = Tier.DEVICE, False
    elif on_host:
        tier, loading = Tier.HOST, held is not None
    elif held is not None or cached_bytes is not None:
        tier, loading = Tier.DISK, held is not None
    else:
        tier, loading = Tier.SOURCE, fetching
    if cached_bytes is None and tier in (Tier.DEVICE, Tier.HOST):
        quarantine = None
    size = cached_bytes if cached_bytes is not None else held.device_bytes if held is not None else 0
    return AdapterStatus(artifact_digest, tier, loading, in_flight, size, pinned, *(quarantine or ("", 0.0)))


class AdapterTable:
    """The status of every adapter, at the cost of those that change. `look_up` returns one's as it is now."""

    def __init__(self, look_up: Callable[[str], AdapterStatus | None]) -> None:
        self._look_up = look_up
        self._table: dict[str, AdapterStatus] = {}
        self._touched: set[str] = set()

    def touch(self, artifact_digests: Iterable[str]) -> None:
        """Note that adapters may have changed."""
        self._touched.update(artifact_digests)

    def view(self) -> Mapping[str, AdapterStatus]:
        """Return all as they are now, by artifact digest; what was returned before does not change with it."""
        if self._touched:
            table = dict(self._table)
            for digest in self._touched:
                found = self._look_up(digest)
                if found is None:
                    table.pop(digest, None)
                elif table.get(digest) != found:
                    table[digest] = found
            self._table = table
            self._touched.clear()
        return self._table


def assemble(
    *,
    worker_id: str,
    epoch: str,
    sequence: int,
    state: State,
    base_digest: str,
    ready: Ready | None,
    engine: EngineStatus | None,
    active_choices: int,
    unseen_tokens: int,
    adapters: Mapping[str, AdapterStatus],
    tiers: Mapping[Tier, TierUse] | None = None,
    dedicated_artifact_digest: str = "",
) -> WorkerStatus:
    """Return the whole status from what the front end and the engine know.

    `active_choices` are all that the engine has yet to finish, `unseen_tokens` the prompt tokens that `engine` does not
    contain yet. Without an engine nothing runs; until its first report it is as it was when it got ready.
    """
    running = engine.running_requests if engine is not None else 0
    return WorkerStatus(
        worker_id=worker_id,
        epoch=epoch,
        sequence=sequence,
        state=state,
        base_digest=base_digest,
        running_requests=running,
        waiting_requests=max(0, active_choices - running),
        queued_prefill_tokens=unseen_tokens + (engine.queued_prefill_tokens if engine is not None else 0),
        prefill_tokens_per_second=(engine or ready or _UNKNOWN).prefill_tokens_per_second,
        decode_tokens_per_second=(engine or ready or _UNKNOWN).decode_tokens_per_second,
        free_blocks=engine.free_blocks if engine is not None else ready.total_blocks if ready is not None else 0,
        total_blocks=ready.total_blocks if ready is not None else 0,
        block_tokens=ready.block_tokens if ready is not None else 0,
        max_context_tokens=ready.max_context_tokens if ready is not None else 0,
        device=ready.device if ready is not None else "",
        dtype=ready.dtype if ready is not None else "",
        base_quantization=ready.base_quantization if ready is not None else "",
        kv_blocks=engine.kv_blocks if engine is not None else 0,
        adapter_chunks=engine.adapter_chunks if engine is not None else 0,
        prefix_blocks=engine.prefix_blocks if engine is not None else 0,
        num_preempted=engine.num_preempted if engine is not None else 0,
        num_cached_tokens=engine.num_cached_tokens if engine is not None else 0,
        adapters=adapters,
        tiers=tiers or {},
        dedicated_artifact_digest=dedicated_artifact_digest,
    )


class StatusBoard:
    """Counts changes and lets streams follow them. `assemble(sequence)` returns the status as it is now."""

    def __init__(self, assemble: Callable[[int], WorkerStatus]) -> None:
        self._assemble = assemble
        self._sequence = 0
        self._watchers: set[asyncio.Event] = set()
        self._ended = False

    def changed(self) -> int:
        """Count a change, wake the streams; returns the sequence of the status that contains it."""
        self._sequence += 1
        for watcher in self._watchers:
            watcher.set()
        return self._sequence

    @property
    def sequence(self) -> int:
        """The sequence of the status as it is now."""
        return self._sequence

    def now(self) -> WorkerStatus:
        """Return the status as it is now."""
        return self._assemble(self._sequence)

    def end(self) -> None:
        """End all streams after one last message each."""
        self._ended = True
        self.changed()

    async def follow(self) -> AsyncGenerator[WorkerStatus, None]:
        """Yield the status: at once, then after changes, at most 10 a second and at least one a second."""
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()
        self._watchers.add(woken)
        try:
            while True:
                woken.clear()
                ended = self._ended
                yield self.now()
                if ended:
                    return
                sent_s = loop.time()
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        await woken.wait()
                except TimeoutError:
                    continue
                if not self._ended:
                    await asyncio.sleep(max(0.0, sent_s + MIN_INTERVAL_S - loop.time()))
        finally:
            self._watchers.discard(woken)
