"""Which adapter is in which device slot and which chunks: bookkeeping only, no loading and no clock.

One slot per artifact digest, however many requests ask for it. A slot is loading until its loader reports, then
resident. References count running requests; a resident slot without any that is not pinned is idle, and only idle ones
may be evicted. Who is evicted is `Memory`'s to decide. A digest may be pinned before it has a slot. The ValueErrors
here are broken invariants, not bad input.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from worker.mailbox import AdapterFile, AdapterOnDevice

FOR_REQUEST: Final = -1
"""Urgency of a load that a request waits for: it goes before all that are ordered."""


@dataclass(slots=True, eq=False)
class Slot:
    """One device slot that holds, or is about to hold, an adapter. Only `Residency` writes it."""

    index: int
    file: AdapterFile
    chunk_ids: tuple[int, ...]
    """Chunks granted while it loads, then those that it occupies."""
    load_started_s: float
    request_id: int
    """Of the request that it is loaded for."""
    tenant: str
    """Of that request."""
    loading: bool = True
    in_flight: int = 0
    device_bytes: int = 0
    """The artifact's size while it loads, then what the runner says it takes."""
    load_s: float = 0.0
    """What its load took."""
    uses: int = 0
    """Requests that it served since it came."""
    pinned: bool = False
    """It stays whatever the demand."""
    unload_ids: list[int] = field(default_factory=list)
    """Orders to unload it, which are done when it leaves; it leaves as soon as it can."""

    @property
    def idle(self) -> bool:
        """Whether it may leave."""
        return not (self.loading or self.in_flight or self.pinned)


@dataclass(frozen=True, slots=True)
class Changes:
    """What has changed since the last time somebody asked, for status."""

    adapters: tuple[AdapterOnDevice, ...] = ()
    """Those that came or changed, as they are now."""
    gone: tuple[str, ...] = ()
    """Artifact digests of those that have left."""

    def __bool__(self) -> bool:
        return bool(self.adapters or self.gone)


@dataclass(frozen=True, slots=True)
class Pinned:
    """Bytes of a pinned adapter's file, those of them for the arena, and what it takes beside the arena."""

    artifact_bytes: int
    arena_bytes: int
    vocabulary_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """A slot and chunks taken for an adapter that is to be loaded."""

    slot: int
    file: AdapterFile
    chunk_ids: tuple[int, ...]
    urgency: int = FOR_REQUEST
    """The lower goes first: FOR_REQUEST, or a mailbox.Urgency."""


class Residency:
    """The adapter slots of one device."""

    def __init__(self, max_adapters: int) -> None:
        self._free = list(range(max_adapters - 1, -1, -1))
        self._by_digest: dict[str, Slot] = {}
        self._by_index: dict[int, Slot] = {}
        self._unused: dict[str, Slot] = {}
        self._pinned: dict[str, Pinned] = {}
        self._changed: dict[str, None] = {}  # a set in the order of the first change
        self._idle_chunks = 0
        self._used_bytes = 0
        self._vocabulary_bytes = 0

    @property
    def vocabulary_bytes(self) -> int:
        """Device bytes of all adapters' embeddings and heads, those being loaded included."""
        return self._vocabulary_bytes

    @property
    def used_bytes(self) -> int:
        """Device bytes of all adapters, those being loaded included."""
        return self._used_bytes

    @property
    def free_slots(self) -> int:
        """Number of slots that hold nothing."""
        return len(self._free)

    @property
    def idle_chunks(self) -> int:
        """Chunks of idle adapters."""
        return self._idle_chunks

    @property
    def pinned(self) -> Mapping[str, Pinned]:
        """Bytes of the pinned adapters by digest, whether they have a slot or not."""
        return self._pinned

    @property
    def pinned_chunks(self) -> int:
        """Chunks of pinned adapters that have a slot."""
        slots = [self._by_digest.get(digest) for digest in self._pinned]
        return sum([len(slot.chunk_ids) for slot in slots if slot is not None])

    @property
    def is_loading(self) -> bool:
        """Whether an adapter is on its way."""
        return any(slot.loading for slot in self._by_index.values())

    def find(self, artifact_digest: str) -> Slot | None:
        """Return the slot of an adapter, loading or resident."""
        return self._by_digest.get(artifact_digest)

    def slot(self, index: int) -> Slot:
        """Return a slot that holds an adapter, loading or resident."""
        return self._by_index[index]

    def unused(self) -> Iterable[Slot]:
        """Return the resident adapters that no request has used since they came."""
        return self._unused.values()

    def loading(self) -> list[Slot]:
        """Return the slots whose adapters are on their way."""
        return [slot for slot in self._by_index.values() if slot.loading]

    def take(self, file: AdapterFile, chunk_ids: tuple[int, ...], request_id: int, tenant: str, now: float) -> Slot:
        """Take a free slot for an adapter that has none and mark it as loading, for a request that waits for it."""
        slot = Slot(self._free.pop(), file, chunk_ids, now, request_id, tenant, device_bytes=file.artifact_bytes)
        slot.pinned = file.artifact_digest in self._pinned
        self._by_digest[file.artifact_digest] = slot
        self._by_index[slot.index] = slot
        self._used_bytes += slot.device_bytes
        self._vocabulary_bytes += file.vocabulary_bytes
        self._note(slot)
        return slot

    def loaded(self, index: int, device_bytes: int, chunks_used: int, seconds: float) -> tuple[Slot, tuple[int, ...]]:
        """Mark a slot's load as done: it is resident. Returns it and the chunks that it does not need."""
        slot = self._loading(index)
        if not 0 <= chunks_used <= len(slot.chunk_ids):
            raise ValueError(f"an adapter occupies {chunks_used} of {len(slot.chunk_ids)} chunks")
        left_over = slot.chunk_ids[chunks_used:]
        slot.chunk_ids = slot.chunk_ids[:chunks_used]
        self._used_bytes += device_bytes - slot.device_bytes
        slot.device_bytes = device_bytes
        slot.load_s = seconds
        slot.loading = False
        self._unused[slot.file.artifact_digest] = slot
        self._count_idle(slot, was_idle=False)
        return slot, left_over

    def failed(self, index: int) -> Slot:
        """Mark a slot's load as failed: the slot is free again. Returns what it was."""
        slot = self._loading(index)
        self._forget(slot)
        return slot

    def evict(self, slot: Slot) -> None:
        """Free the slot of an idle adapter."""
        if not slot.idle:
            raise ValueError(f"slot {slot.index} is in use")
        self._unused.pop(slot.file.artifact_digest, None)
        self._idle_chunks -= len(slot.chunk_ids)
        self._forget(slot)

    def acquire(self, artifact_digest: str) -> int:
        """Add a reference to a resident adapter and return its slot."""
        slot = self._by_digest[artifact_digest]
        if slot.loading:
            raise ValueError(f"adapter {artifact_digest} is not resident yet")
        was_idle = slot.idle
        self._unused.pop(artifact_digest, None)
        slot.in_flight += 1
        slot.uses += 1
        self._count_idle(slot, was_idle=was_idle)
        return slot.index

    def release(self, index: int) -> Slot:
        """Drop a reference to the adapter in a slot; without any it is idle, until its room is needed."""
        slot = self._by_index[index]
        if slot.in_flight < 1:
            raise ValueError(f"slot {index} has no reference to drop")
        slot.in_flight -= 1
        self._count_idle(slot, was_idle=False)
        return slot

    def pin(self, artifact_digest: str, pinned: Pinned) -> None:
        """Keep an adapter from being evicted, from now on or from when it comes."""
        self._pinned[artifact_digest] = pinned
        self._set_pinned(artifact_digest, pinned=True)

    def unpin(self, artifact_digest: str) -> None:
        """Let an adapter be evicted again, if it was pinned."""
        if self._pinned.pop(artifact_digest, None) is not None:
            self._set_pinned(artifact_digest, pinned=False)

    def take_changes(self) -> Changes:
        """Return what has changed since the last call: this costs what has changed, not what is resident."""
        slots = {digest: self._by_digest.get(digest) for digest in self._changed}
        self._changed.clear()
        return Changes(
            tuple(
                [
                    AdapterOnDevice(digest, slot.loading, slot.in_flight, slot.device_bytes, slot.load_s)
                    for digest, slot in slots.items()
                    if slot is not None
                ]
            ),
            tuple([digest for digest, slot in slots.items() if slot is None]),
        )

    def _loading(self, index: int) -> Slot:
        slot = self._by_index[index]
        if not slot.loading:
            raise ValueError(f"slot {index} was not being loaded")
        return slot

    def _set_pinned(self, artifact_digest: str, *, pinned: bool) -> None:
        slot = self._by_digest.get(artifact_digest)
        if slot is not None:
            was_idle = slot.idle
            slot.pinned = pinned
            self._count_idle(slot, was_idle=was_idle)

    def _count_idle(self, slot: Slot, *, was_idle: bool) -> None:
        """Count a slot that changed."""
        self._idle_chunks += (slot.idle - was_idle) * len(slot.chunk_ids)
        self._note(slot)

    def _forget(self, slot: Slot) -> None:
        del self._by_digest[slot.file.artifact_digest]
        del self._by_index[slot.index]
        self._used_bytes -= slot.device_bytes
        self._vocabulary_bytes -= slot.file.vocabulary_bytes
        self._free.append(slot.index)
        self._note(slot)

    def _note(self, slot: Slot) -> None:
        self._changed[slot.file.artifact_digest] = None
