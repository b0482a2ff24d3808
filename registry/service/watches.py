"""Watch: the catalog as a stream, without gaps and without queues.

Each watcher reads the change log from its own revision on, so a slow one costs nothing but its log position; one that
falls out of the log is sent away and starts from a snapshot. The head signal only says when to look.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Final

from loraplex.errors import Draining, Unavailable
from loraplex.registry.v1 import adapter_pb2
from registry.domain import Entry
from registry.head_signal import HeadSignal
from registry.service.messages import entry_message
from registry.store import Reader, Store

_CHANGES_AT_A_TIME: Final = 64
_PART_BYTES: Final = 2**20  # a snapshot part closes when it has reached this


class Watches:
    """Serves watchers from the store."""

    def __init__(self, store: Store, signal: HeadSignal, *, heartbeat_s: float) -> None:
        self._store = store
        self._signal = signal
        self._heartbeat_s = heartbeat_s

    async def watch(self, request: adapter_pb2.WatchRequest) -> AsyncIterator[adapter_pb2.WatchResponse]:
        """Serve one watcher until it leaves or the service drains."""
        async with self._store.read() as reader:
            snapshot = None if await _resumable(request, reader) else await reader.snapshot()
        if snapshot is None:
            cursor = request.revision
            yield adapter_pb2.WatchResponse(resumed=adapter_pb2.Resumed(revision=cursor))
        else:
            cursor = snapshot.head.revision
            for part in _parts(snapshot.entries):
                yield adapter_pb2.WatchResponse(snapshot=part)
            synced = adapter_pb2.Synced(store_id=snapshot.head.store_id, revision=cursor)
            yield adapter_pb2.WatchResponse(synced=synced)
            del snapshot
        async for event in self._follow(cursor):
            yield event

    async def _follow(self, cursor: int) -> AsyncIterator[adapter_pb2.WatchResponse]:
        loop = asyncio.get_running_loop()
        beat_at = loop.time() + self._heartbeat_s
        while not self._signal.closed:
            async with self._store.read() as reader:
                changes = await reader.changes(cursor, _CHANGES_AT_A_TIME)
            for change in changes:
                if change.revision != cursor + 1:
                    raise Unavailable(
                        f"the watcher fell behind: revision {cursor + 1} is no longer in the change log; watch again"
                    )
                cursor = change.revision
                entries = [entry_message(entry) for entry in change.entries]
                yield adapter_pb2.WatchResponse(change=adapter_pb2.Change(revision=cursor, entries=entries))
            self._signal.advance(cursor)  # the log may be ahead of the signal where others write too
            if loop.time() >= beat_at:
                heartbeat = adapter_pb2.Heartbeat(head_revision=self._signal.revision)
                yield adapter_pb2.WatchResponse(heartbeat=heartbeat)
                beat_at = loop.time() + self._heartbeat_s
            await self._signal.wait_beyond(cursor, beat_at - loop.time())
        raise Draining("the registry is going down; watch again")


async def _resumable(request: adapter_pb2.WatchRequest, reader: Reader) -> bool:
    """Tell whether the log goes on exactly where this watcher's catalog ends."""
    head = await reader.head()
    if request.store_id != head.store_id or request.revision > head.revision:
        return False
    if request.revision == head.revision:
        return True
    following = await reader.changes(request.revision, 1)
    return bool(following) and following[0].revision == request.revision + 1


def _parts(entries: Iterable[Entry]) -> Iterator[adapter_pb2.SnapshotPart]:
    """Cut a snapshot into messages of moderate size."""
    part, size = adapter_pb2.SnapshotPart(), 0
    for entry in entries:
        message = entry_message(entry)
        part.entries.append(message)
        size += message.ByteSize()
        if size >= _PART_BYTES:
            yield part
            part, size = adapter_pb2.SnapshotPart(), 0
    if part.entries:
        yield part
