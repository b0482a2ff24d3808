"""Which adapter is in which device slot: bookkeeping only, no loading and no clock.

One slot per artifact digest, however many requests ask for it. A slot is loading until its loader reports, then
resident. References count running requests. Only resident adapters without references are evicted, least recently
used first, and never one that the caller says is claimed. The ValueErrors here are broken invariants, not bad input.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from worker.mailbox import AdapterFile, AdapterOnDevice


@dataclass(slots=True, eq=False)
class Slot:
    """One device slot that holds, or is about to hold, an adapter. Only `Residency` writes it."""

    index: int
    file: AdapterFile
    load_started_s: float
    loading: bool = True
    in_flight: int = 0
    device_bytes: int = 0
    """The artifact's size while it loads, then what the runner says it takes."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A slot taken for an adapter, and the slots whose adapters left the device for it."""

    slot: int
    file: AdapterFile
    evicted_slots: tuple[int, ...]


class Residency:
    """The adapter slots of one device."""

    def __init__(self, max_adapters: int, max_bytes: int | None = None) -> None:
        self._max_bytes = max_bytes
        self._free = list(range(max_adapters - 1, -1, -1))
        self._by_digest: dict[str, Slot] = {}  # least recently used first
        self._by_index: dict[int, Slot] = {}
        self._used_bytes = 0
        self._view: tuple[AdapterOnDevice, ...] | None = ()

    @property
    def used_bytes(self) -> int:
        """Device bytes of all adapters, those being loaded included."""
        return self._used_bytes

    @property
    def free_slots(self) -> int:
        """Number of slots that hold nothing."""
        return len(self._free)

    def find(self, artifact_digest: str) -> Slot | None:
        """Return the slot of an adapter, loading or resident."""
        return self._by_digest.get(artifact_digest)

    def can_ever_hold(self, file: AdapterFile) -> bool:
        """Tell whether the adapter fits an otherwise empty device."""
        return self._max_bytes is None or file.artifact_bytes <= self._max_bytes

    def place(self, file: AdapterFile, claimed: Container[str], now: float) -> Placement | None:
        """Take a slot for an adapter that has none and mark it as loading; evict idle adapters where that is needed.

        Adapters whose digest is in `claimed` stay. Returns None, and changes nothing, when no slot or too few bytes
        can be had.
        """
        victims = self._victims(file.artifact_bytes, claimed)
        if victims is None:
            return None
        for victim in victims:
            self._forget(victim)
        slot = Slot(self._free.pop(), file, now, device_bytes=file.artifact_bytes)
        self._by_digest[file.artifact_digest] = slot
        self._by_index[slot.index] = slot
        self._used_bytes += slot.device_bytes
        self._view = None
        return Placement(slot.index, file, tuple(victim.index for victim in victims))

    def loaded(self, index: int, device_bytes: int) -> Slot:
        """Mark a slot's load as done: it is resident and takes `device_bytes`."""
        slot = self._loading(index)
        self._used_bytes += device_bytes - slot.device_bytes
        slot.device_bytes = device_bytes
        slot.loading = False
        self._view = None
        return slot

    def failed(self, index: int) -> Slot:
        """Mark a slot's load as failed: the slot is free again. Returns what it was."""
        slot = self._loading(index)
        self._forget(slot)
        return slot

    def acquire(self, artifact_digest: str) -> int:
        """Add a reference to a resident adapter and return its slot."""
        slot = self._by_digest[artifact_digest]
        if slot.loading:
            raise ValueError(f"adapter {artifact_digest} is not resident yet")
        slot.in_flight += 1
        self._touch(slot)
        return slot.index

    def release(self, index: int) -> None:
        """Drop a reference to the adapter in a slot; it stays resident until its room is needed."""
        slot = self._by_index[index]
        if slot.in_flight < 1:
            raise ValueError(f"slot {index} has no reference to drop")
        slot.in_flight -= 1
        self._touch(slot)

    def view(self) -> tuple[AdapterOnDevice, ...]:
        """Return every adapter held or being loaded, for status; the same object until something changes."""
        if self._view is None:
            self._view = tuple(
                AdapterOnDevice(slot.file.artifact_digest, slot.loading, slot.in_flight, slot.device_bytes)
                for slot in sorted(self._by_digest.values(), key=lambda slot: slot.index)
            )
        return self._view

    def _victims(self, new_bytes: int, claimed: Container[str]) -> list[Slot] | None:
        """Return the idle slots to evict so that one slot and `new_bytes` are free, or None if that cannot be."""
        missing_slots = 0 if self._free else 1
        missing_bytes = 0 if self._max_bytes is None else self._used_bytes + new_bytes - self._max_bytes
        victims: list[Slot] = []
        if missing_slots <= 0 and missing_bytes <= 0:
            return victims
        for digest, slot in self._by_digest.items():
            if not (slot.loading or slot.in_flight) and digest not in claimed:
                victims.append(slot)
                missing_slots -= 1
                missing_bytes -= slot.device_bytes
                if missing_slots <= 0 and missing_bytes <= 0:
                    return victims
        return None

    def _loading(self, index: int) -> Slot:
        slot = self._by_index[index]
        if not slot.loading:
            raise ValueError(f"slot {index} was not being loaded")
        return slot

    def _touch(self, slot: Slot) -> None:
        self._by_digest[slot.file.artifact_digest] = self._by_digest.pop(slot.file.artifact_digest)
        self._view = None

    def _forget(self, slot: Slot) -> None:
        del self._by_digest[slot.file.artifact_digest]
        del self._by_index[slot.index]
        self._used_bytes -= slot.device_bytes
        self._free.append(slot.index)
        self._view = None
