"""What broken uploads left behind, kept for a while so that their clients can go on where they were.

A file is found by its owner, its name, its size and the SHA-256 of its whole content, and by nothing else: who does not
know what the file will be neither finds nor completes it. It is bounded in time and, all together, in bytes, gives way
where the disk runs short, and does not outlive the process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from registry.incoming import IncomingFile

log = structlog.get_logger(__name__)

_MIN_BYTES: Final = 2**16
"""Less is not worth a question."""


@dataclass(frozen=True, slots=True)
class FileKey:
    """Which file a part is of."""

    tenant: str
    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class _Kept:
    file: IncomingFile
    until_s: float


class PartialUploads:
    """Owns the folder of kept files. Its methods block for a moment and may be called from any thread.

    `clock` returns monotonic seconds.
    """

    def __init__(
        self, folder: Path, *, max_bytes: int, keep_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._keep_s = keep_s
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: dict[FileKey, _Kept] = {}  # oldest first
        self._num_files = 0

    def keep(self, key: FileKey, file: IncomingFile) -> None:
        """Take over a closed file. One that is too small, or less than what is here of it already, is dropped."""
        with self._lock:
            self._drop_old()
            known = self._kept.get(key)
            if file.size_bytes < _MIN_BYTES or file.size_bytes > self._max_bytes:
                return
            if known is not None and known.file.size_bytes >= file.size_bytes:
                return
            if known is not None:
                self._drop(key)
            while self._kept and self._num_bytes() + file.size_bytes > self._max_bytes:
                self._drop(next(iter(self._kept)))
            self._num_files += 1
            file.move(self._folder / str(self._num_files))
            self._kept[key] = _Kept(file, self._clock() + self._keep_s)
        log.info("registry.partial_upload_kept", file=key.name, bytes=file.size_bytes, of=key.size_bytes)

    def size_bytes(self, key: FileKey) -> int:
        """Return how much of a file is here."""
        with self._lock:
            self._drop_old()
            kept = self._kept.get(key)
            return kept.file.size_bytes if kept else 0

    def take(self, key: FileKey, path: Path) -> IncomingFile | None:
        """Give up a file to the upload that goes on with it, open and moved to `path`; None where nothing is here."""
        with self._lock:
            self._drop_old()
            kept = self._kept.pop(key, None)
            if kept is None:
                return None
            kept.file.move(path)
            kept.file.reopen()
            return kept.file

    def drop_old(self) -> float | None:
        """Remove what has been here for too long; return when the next is due, in seconds from now, or None."""
        with self._lock:
            self._drop_old()
            first = next(iter(self._kept.values()), None)
            return None if first is None else max(0.0, first.until_s - self._clock())

    def clear(self) -> None:
        """Remove everything, for those who need the space."""
        with self._lock:
            for key in list(self._kept):
                self._drop(key)

    def _drop_old(self) -> None:
        for key in [key for key, kept in self._kept.items() if kept.until_s <= self._clock()]:
            self._drop(key)

    def _drop(self, key: FileKey) -> None:
        self._kept.pop(key).file.path.unlink(missing_ok=True)

    def _num_bytes(self) -> int:
        return sum(kept.file.size_bytes for kept in self._kept.values())
