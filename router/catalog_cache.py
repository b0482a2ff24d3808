"""A copy of the catalog on disk, so that a router can start while the registry is down.

One header line (kind, format number, SHA-256 of the rest), then JSON. Written atomically with mode 0600; a file that
is damaged, or that others could have written, is ignored with a warning.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import stat
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import structlog

from router.catalog import Adapter, ApiKey, Base, Catalog, CatalogSnapshot, Entry, Version

log = structlog.get_logger(__name__)

_KIND: Final = "loraplex-catalog"
_FORMAT: Final = "2"
_WRITE_INTERVAL_S: Final = 1.0


class DamagedCache(Exception):
    """The file is not a catalog this router may trust; the message says why."""


def encode(snapshot: CatalogSnapshot) -> bytes:
    """Return the file's bytes."""
    body = json.dumps(
        {
            "store_id": snapshot.store_id,
            "revision": snapshot.revision,
            "bases": [asdict(base) for base in snapshot.bases.values()],
            "adapters": [asdict(adapter) for adapter in snapshot.adapters.values()],
            "api_keys": [asdict(key) for key in snapshot.api_keys.values()],
        },
        separators=(",", ":"),
        sort_keys=True,
    ).encode()
    return f"{_KIND} {_FORMAT} {hashlib.sha256(body).hexdigest()}\n".encode() + body


def decode(content: bytes) -> CatalogSnapshot:
    """Return the catalog of a file's bytes. Raises DamagedCache."""
    header, newline, body = content.partition(b"\n")
    words = header.decode("ascii", "replace").split(" ")
    if not newline or len(words) != 3 or words[0] != _KIND:
        raise DamagedCache("it is not a catalog cache")
    if words[1] != _FORMAT:
        raise DamagedCache(f"its format is {words[1]}, this router reads {_FORMAT}")
    if hashlib.sha256(body).hexdigest() != words[2]:
        raise DamagedCache("its checksum does not match")
    try:
        data: dict[str, Any] = json.loads(body)
        entries: list[Entry] = [
            *(Base(**base) for base in data["bases"]),
            *(_adapter(adapter) for adapter in data["adapters"]),
            *(ApiKey(**key) for key in data["api_keys"]),
        ]
        return CatalogSnapshot().apply(entries, store_id=str(data["store_id"]), revision=int(data["revision"]))
    except (ValueError, TypeError, KeyError) as error:
        raise DamagedCache(f"its content is not as expected: {error}") from error


def _adapter(data: dict[str, Any]) -> Adapter:
    return Adapter(
        data["tenant"],
        data["name"],
        data["base_id"],
        Version(**data["current"]),
        tuple(Version(**version) for version in data["versions"]),
        int(data.get("pin_replicas", 0)),
    )


def read(path: Path) -> CatalogSnapshot:
    """Read the file. Raises DamagedCache and FileNotFoundError."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise DamagedCache("other users could have written it; it must be ours with mode 0600")
            return decode(file.read())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedCache(f"it cannot be read: {error}") from error


def write(path: Path, snapshot: CatalogSnapshot) -> None:
    """Replace the file atomically; mode 0600. Raises OSError."""
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # made with mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(encode(snapshot))
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)  # noqa: PTH105 - one atomic call
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(scratch)  # noqa: PTH108 - the pair of mkstemp
        raise


def load_into(catalog: Catalog, path: Path) -> bool:
    """Put the file's catalog in place, where it is good. Tells whether it was."""
    try:
        snapshot = read(path)
    except FileNotFoundError:
        return False
    except DamagedCache as error:
        log.warning("catalog.cache_ignored", path=str(path), error=str(error))
        return False
    catalog.swap(snapshot)
    log.info("catalog.cache_loaded", path=str(path), revision=snapshot.revision, adapters=len(snapshot.adapters))
    return True


class CacheWriter:
    """Writes the catalog to its file after changes, at most once a second."""

    def __init__(self, catalog: Catalog, path: Path) -> None:
        self._catalog = catalog
        self._path = path
        self._written: CatalogSnapshot | None = catalog.snapshot if catalog.ready.is_set() else None
        self._turn = threading.Lock()
        self._begun = self._done = 0
        """Writes, the newest of each."""

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            changed = self._catalog.changed
            await self.flush()
            await changed.wait()
            await asyncio.sleep(_WRITE_INTERVAL_S)  # gathers a burst of changes into one write

    async def flush(self) -> None:
        """Write now, if there is something new. A failure is logged; serving does not depend on the file.

        The thread of a write whose waiter is cancelled goes on; what is newer is written after it, or in its place.
        """
        snapshot = self._catalog.snapshot
        if not self._catalog.ready.is_set() or snapshot is self._written:
            return
        self._begun += 1
        try:
            await asyncio.to_thread(self._write, snapshot, self._begun)
        except OSError as error:
            log.warning("catalog.cache_not_written", path=str(self._path), error=str(error))
        else:
            self._written = snapshot

    def _write(self, snapshot: CatalogSnapshot, number: int) -> None:
        with self._turn:
            if number > self._done:
                write(self._path, snapshot)
                self._done = number
