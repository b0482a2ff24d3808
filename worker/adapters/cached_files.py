"""The files of the disk cache: which are there, who uses them, and who leaves first. It deletes files, but writes none.

Who is used, waited for or kept does not leave; of the others, who is worth least by `worker.engine.idle`, and those of
adapters on the device last. All of it is for one thread.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import structlog

from worker.adapters.outside import NOTHING, Outside
from worker.engine.idle import IdleOrder, Level, worth

log = structlog.get_logger(__name__)

_HASH_STEP: Final = 2**22
_TOUCH_S: Final = 60.0
_NOT_THE_FILES_FAULT: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


@dataclass(frozen=True, slots=True)
class Stamp:
    """What the file system notes of a file.

    Who writes to it, or puts another in its place, changes some of it, but within one tick of the file system's clock,
    which has a few milliseconds at most.
    """

    inode: int
    size_bytes: int
    modified_ns: int
    changed_ns: int
    """Unlike `modified_ns`, nobody can set it back."""

    @classmethod
    def of(cls, facts: os.stat_result) -> Self:
        """Return a file's stamp."""
        return cls(facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)


@dataclass(slots=True)
class CachedFile:
    """A file in the folder."""

    size_bytes: int
    stamp: Stamp | None
    """The file's when its bytes were last hashed in this process's life; None where they are to be hashed first."""
    fetch_s: float
    """What fetching it took, or would take as far as is known."""
    outside: Outside = NOTHING
    """What of it does not go into the arena; known once it was hashed."""
    replaced_damaged: bool = False
    """It came in the place of one that was not as it should be, and that a load may have read meanwhile."""
    uses: int = 0
    touched_s: float = 0.0
    """When the file last was told to be in use, for the next process to know."""


class CachedFiles:
    """Files by artifact digest. `on_change` hears of one that has left; `is_on_device` tells of its adapter."""

    def __init__(self, folder: Path, *, on_change: Callable[[str], None], is_on_device: Callable[[str], bool]) -> None:
        self._folder = folder
        self._on_change = on_change
        self._is_on_device = is_on_device
        self._files: dict[str, CachedFile] = {}
        self._idle: IdleOrder[str] = IdleOrder()
        self._level = Level()
        self._users: Counter[str] = Counter()
        self._kept: set[str] = set()

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __contains__(self, artifact_digest: str) -> bool:
        return artifact_digest in self._files

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self._files.values())

    @property
    def num_users(self) -> int:
        """Uses that have not been released."""
        return self._users.total()

    @property
    def kept_bytes(self) -> int:
        """Bytes of the files that stay for good."""
        return sum(self._files[digest].size_bytes for digest in self._kept if digest in self._files)

    @property
    def idle_bytes(self) -> int:
        """Bytes of the files that nobody uses."""
        return sum(file.size_bytes for digest, file in self._files.items() if not self._users[digest])

    @property
    def can_leave(self) -> bool:
        """Whether a file is idle whose adapter is not on the device."""
        return self._idle.least(self._on_device()) is not None

    def find(self, artifact_digest: str) -> CachedFile | None:
        """Return a file's facts."""
        return self._files.get(artifact_digest)

    def usable(self, artifact_digest: str) -> CachedFile | None:
        """Return the facts of a file whose bytes were hashed, and that nobody has touched since.

        One that somebody has touched loses its stamp: it is to be hashed again.
        """
        file = self._files.get(artifact_digest)
        if file is None or file.stamp is None:
            return None
        if file.stamp != self._stamp(artifact_digest):
            file.stamp = None
            log.warning(
                "artifact.changed_on_disk",
                artifact=artifact_digest[:12],
                what_now="it is hashed before its next use",
            )
            return None
        return file

    def add(self, artifact_digest: str, file: CachedFile) -> None:
        """Note that a file is in the folder."""
        self._files[artifact_digest] = file
        self._retire(artifact_digest)

    def use(self, artifact_digest: str) -> None:
        """Keep a file, there or on its way, until `release`."""
        self._users[artifact_digest] += 1
        self._idle.discard(artifact_digest)

    def is_used(self, artifact_digest: str) -> bool:
        """Tell whether somebody uses a file or waits for it."""
        return self._users[artifact_digest] > 0

    def release(self, artifact_digest: str) -> bool:
        """End a use; returns whether it was the last."""
        self._users[artifact_digest] -= 1
        if self._users[artifact_digest]:
            return False
        del self._users[artifact_digest]
        self._touch(artifact_digest)
        self._retire(artifact_digest)
        return True

    def keep(self, artifact_digest: str, *, kept: bool) -> None:
        """Count a file among those that stay for good, or no longer."""
        if kept:
            self._kept.add(artifact_digest)
        else:
            self._kept.discard(artifact_digest)

    def drop(self, artifact_digest: str) -> None:
        """Delete a file, at once: on another thread it could hit one that was fetched again meanwhile."""
        self._files.pop(artifact_digest, None)
        self._idle.discard(artifact_digest)
        (self._folder / artifact_digest).unlink(missing_ok=True)
        self._on_change(artifact_digest)

    def evict(self, wanted_bytes: int, *, spare_device: bool = False) -> int:
        """Evict idle files until `wanted_bytes` are freed or none is left; returns the bytes freed.

        Those of adapters on the device go last, or not at all.
        """
        freed_bytes = 0
        on_device = self._on_device()
        while freed_bytes < wanted_bytes:
            found = self._idle.least(on_device) or (None if spare_device else self._idle.least())
            if found is None:
                break
            priority, digest = found
            self._level.rise(priority)
            freed_bytes += self._files[digest].size_bytes
            self.drop(digest)
            log.info("artifact.evicted", artifact=digest[:12])
        return freed_bytes

    def _on_device(self) -> set[str]:
        return {digest for digest in self._files if self._is_on_device(digest)}

    def _retire(self, artifact_digest: str) -> None:
        """Let a file leave when its turn comes, unless somebody uses it."""
        file = self._files.get(artifact_digest)
        if file is not None and not self._users[artifact_digest]:
            self._idle.discard(artifact_digest)
            priority = self._level.value + worth(file.fetch_s, file.uses + 1, file.size_bytes)
            self._idle.add(artifact_digest, priority)

    def _touch(self, artifact_digest: str) -> None:
        """Note on the file that it was used, now and then: by that the next process orders what it finds."""
        now = time.monotonic()
        file = self.usable(artifact_digest)
        if file is not None and now - file.touched_s > _TOUCH_S:
            file.touched_s = now
            with contextlib.suppress(OSError):
                os.utime(self._folder / artifact_digest)
            file.stamp = self._stamp(artifact_digest)

    def _stamp(self, artifact_digest: str) -> Stamp | None:
        try:
            return Stamp.of((self._folder / artifact_digest).stat())
        except OSError:
            return None


def verify(path: Path, artifact_digest: str, size_bytes: int) -> Stamp | None:
    """Return a file's stamp where it has the size and SHA-256 it should have, else None. Reads all of it.

    Raises OSError where this process has no room to read it now, whatever is in it.
    """
    sha256 = hashlib.sha256()
    try:
        with path.open("rb") as stream:
            stamp = Stamp.of(os.fstat(stream.fileno()))  # before the first byte is read: what is written later shows
            if stamp.size_bytes != size_bytes:
                return None
            while chunk := stream.read(_HASH_STEP):
                sha256.update(chunk)
    except OSError as error:
        if error.errno in _NOT_THE_FILES_FAULT:
            raise
        return None
    return stamp if sha256.hexdigest() == artifact_digest else None
