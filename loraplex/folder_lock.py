"""One process per folder: an advisory lock that the kernel drops when its holder dies, however it dies.

The lock file tells who holds it, for the words of a refusal; the lock itself is the kernel's.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from loraplex.errors import FailedPrecondition


@dataclass(frozen=True, slots=True)
class FolderLock:
    """A lock file in a folder, and how to speak of the folder when another process has it."""

    folder: Path
    what: str
    """What the folder is to people: "the state folder"."""
    remedy: str
    """What to do: "choose another folder with --state-dir"."""
    field: str | None = None
    """The setting that names the folder, where one does."""
    file_name: str = "lock"
    needs_space: bool = False
    """A disk without room for the holder's name is refused; else only the name goes missing."""

    def take(self) -> int:
        """Make the folder (private to the user) where there is none and lock it; return the lock, an open file.

        Raises FailedPrecondition, naming the holder's pid and host, where another process has it, and OSError where
        the folder cannot be used. Closing the file unlocks.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self.folder / self.file_name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise self._refusal(
                    f"{self.what} {self.folder} is in use by {_holder(lock)}; stop that process or {self.remedy}"
                ) from error
            with contextlib.suppress(*(() if self.needs_space else (OSError,))):
                os.ftruncate(lock, 0)
                os.write(lock, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
        except BaseException:
            os.close(lock)
            raise
        return lock

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder while the block runs. Raises FailedPrecondition, also where the folder cannot be used."""
        try:
            lock = self.take()
        except OSError as error:
            raise self._refusal(
                f"{self.what} {self.folder} cannot be used: {error.strerror or error}; {self.remedy}"
            ) from error
        try:
            yield
        finally:
            os.close(lock)

    def _refusal(self, message: str) -> FailedPrecondition:
        return FailedPrecondition(message) if self.field is None else FailedPrecondition(message, field=self.field)


def _holder(lock: int) -> str:
    try:
        holder = json.loads(os.pread(lock, 4096, 0))
        return f"process {holder['pid']} on host {holder['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
