"""The host tier: adapters in page-locked memory, so that they come to the device without their files. Policy alone.

Between device and disk on GPUs. Its memory is not what the device reads: a load cuts tiles out of it, into a buffer of
its own. A copy stays when its adapter leaves the device, and leaves itself by the rule of `worker.engine.idle` when
others need its room. On CPUs there is none: the mapped file is in the host's memory already, and a second copy would
only take room from the first. Where memory comes from is the allocator's to know.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import numpy as np
import structlog
from numpy.typing import NDArray

from common.adapter_format.packed import PackedAdapter, open_packed
from worker.engine.idle import IdleOrder, Level, worth
from worker.engine.plan import HostChanges

log = structlog.get_logger(__name__)

Allocate = Callable[[int], NDArray[np.uint8]]
"""Returns so many bytes of page-locked memory, 64-byte aligned. Raises MemoryError or RuntimeError without any."""

_ALIGNMENT: Final = 64
_Packed = TypeVar("_Packed")


@dataclass(slots=True)
class _Copy:
    """An adapter in the tier."""

    adapter: PackedAdapter
    num_bytes: int
    copy_s: float
    """What reading its file and copying it took."""
    uses: int = 0


class HostTier:
    """Copies of adapters by artifact digest, which is their files' name; for any thread.

    Whoever loads an adapter keeps its arrays, so a copy may leave meanwhile: its memory is free when nobody uses it.
    """

    def __init__(
        self,
        budget_bytes: int,
        allocate: Allocate,
        *,
        open_file: Callable[[Path], PackedAdapter] = open_packed,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.budget_bytes = budget_bytes
        self._allocate, self._open_file, self._clock = allocate, open_file, clock
        self._lock = threading.Lock()
        self._copies: dict[str, _Copy] = {}
        self._order: IdleOrder[str] = IdleOrder()
        self._level = Level()
        self._used_bytes = 0
        self._changed: dict[str, None] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes of all copies."""
        return self._used_bytes

    def open(self, path: Path) -> PackedAdapter:
        """Return the adapter of a packed file, from its copy if there is one. Raises as `open_packed`."""
        digest = path.name
        with self._lock:
            copy = self._copies.get(digest)
            if copy is not None:
                self._used(digest, copy)
                return copy.adapter
        began_s = self._clock()
        packed = self._open_file(path)
        num_bytes = sum(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays_of(packed))
        if num_bytes > self.budget_bytes:
            return packed
        with self._lock:
            if digest in self._copies:  # another thread was faster
                return self._copies[digest].adapter
            if not self._make_room(num_bytes):
                return packed
            self._used_bytes += num_bytes  # before the memory is taken, which needs no lock
        try:
            adapter = copied(packed, self._allocate(num_bytes))
        except (MemoryError, RuntimeError) as error:
            log.warning("adapter.no_host_memory", artifact=digest[:12], size_bytes=num_bytes, why=str(error))
            with self._lock:
                self._used_bytes -= num_bytes
            return packed
        with self._lock:
            if digest in self._copies:
                self._used_bytes -= num_bytes
                return self._copies[digest].adapter
            copy = self._copies[digest] = _Copy(adapter, num_bytes, self._clock() - began_s)
            self._changed[digest] = None
            self._used(digest, copy)
        return adapter

    def forget(self, artifact_digest: str) -> None:
        """Drop the copy of an adapter that could not be loaded, or is to be kept nowhere, if there is one."""
        with self._lock:
            if artifact_digest in self._copies:
                self._drop(artifact_digest)

    def take_changes(self) -> HostChanges:
        """Return which adapters came and left since the last call."""
        if not self._changed:
            return HostChanges(self._used_bytes)
        with self._lock:
            changed, self._changed = self._changed, {}
            came = tuple([digest for digest in changed if digest in self._copies])
            gone = tuple([digest for digest in changed if digest not in self._copies])
            return HostChanges(self._used_bytes, came, gone)

    # With the lock held.

    def _used(self, digest: str, copy: _Copy) -> None:
        copy.uses += 1
        self._order.discard(digest)
        self._order.add(digest, self._level.value + worth(copy.copy_s, copy.uses, copy.num_bytes))

    def _make_room(self, num_bytes: int) -> bool:
        """Drop copies until so many bytes fit; returns whether they do: what other threads copy meanwhile stays."""
        missing_bytes = self._used_bytes + num_bytes - self.budget_bytes
        if missing_bytes > sum(copy.num_bytes for copy in self._copies.values()):
            return False
        while self._used_bytes + num_bytes > self.budget_bytes and (least := self._order.least()) is not None:
            self._level.rise(least[0])
            self._drop(least[1])
        return True

    def _drop(self, digest: str) -> None:
        self._used_bytes -= self._copies.pop(digest).num_bytes
        self._order.discard(digest)
        self._changed[digest] = None


def arrays_of(value: object) -> Iterator[NDArray[Any]]:
    """Iterate over the arrays in a packed adapter, or in a part of one."""
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from arrays_of(each)
    elif is_dataclass(value):
        for field in fields(value):
            yield from arrays_of(getattr(value, field.name))


def copied(packed: PackedAdapter, memory: NDArray[np.uint8]) -> PackedAdapter:
    """Return the same adapter with its arrays, each 64-byte aligned, in `memory`; read-only."""
    used = 0

    def copy(array: NDArray[Any]) -> NDArray[Any]:
        nonlocal used
        room = memory[used : used + array.nbytes].view(array.dtype).reshape(array.shape)
        used += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        room[...] = array
        room.flags.writeable = False
        return room

    return _mapped(packed, copy)


def _mapped(value: _Packed, change: Callable[[NDArray[Any]], NDArray[Any]]) -> _Packed:
    result: object = value
    if isinstance(value, np.ndarray):
        result = change(value)
    elif isinstance(value, tuple):
        result = tuple([_mapped(each, change) for each in value])
    elif is_dataclass(value) and not isinstance(value, type):
        result = replace(value, **{field.name: _mapped(getattr(value, field.name), change) for field in fields(value)})
    return cast("_Packed", result)
