"""A file on its way in, from an upload or an import: hashed as it grows, and nobody's until it is whole.

Its methods block; one thread at a time calls them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from registry.artifacts import full_disk_is_no_space

MAX_CONFIG_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True)
class ReceivedFiles:
    """A whole adapter: the config's bytes and where the weights lie."""

    config: bytes
    weights: Path


class IncomingFile:
    """Owns the file at `path`. `size_bytes` counts what is written and hashed."""

    def __init__(self, path: Path) -> None:
        """Make the file. Raises NoSpace."""
        self.path = path
        self.size_bytes = 0
        self._hash = hashlib.sha256()
        with full_disk_is_no_space():
            self._stream = path.open("wb", buffering=0)

    def append(self, data: bytes) -> None:
        """Write down what comes next. Raises NoSpace, after which the file is of no use."""
        with full_disk_is_no_space():
            rest = memoryview(data)
            while rest:
                rest = rest[self._stream.write(rest) :]
        self._hash.update(data)
        self.size_bytes += len(data)

    def restart(self) -> None:
        """Forget all that came."""
        with full_disk_is_no_space():
            self._stream.truncate(0)
            self._stream.seek(0)
        self.size_bytes = 0
        self._hash = hashlib.sha256()

    def move(self, path: Path) -> None:
        """Put the file elsewhere on its disk, open or not."""
        self.path.rename(path)
        self.path = path

    def reopen(self) -> None:
        """Open the file again to go on after what was written."""
        self._stream = self.path.open("r+b", buffering=0)
        self._stream.seek(self.size_bytes)

    def close(self) -> None:
        """Close the file; what it holds stays."""
        self._stream.close()

    @property
    def sha256(self) -> str:
        """Lower-case hex SHA-256 of what came so far."""
        return self._hash.hexdigest()
