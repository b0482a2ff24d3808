"""A file on its way in, from an upload or an import: hashed as it grows, and nobody's until it is whole.

Its methods block; one thread at a time calls them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

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
        self._stream: BinaryIO = self._opened()

    def append(self, data: bytes) -> None:
        """Write down what comes next. Raises NoSpace, after which the file is of no use."""
        with full_disk_is_no_space():
            self._stream.write(data)
        self._hash.update(data)
        self.size_bytes += len(data)

    def restart(self) -> None:
        """Forget all that came."""
        with full_disk_is_no_space():
            self._stream.truncate(0)
            self._stream.seek(0)
        self.size_bytes = 0
        self._hash = hashlib.sha256()

    def close(self) -> None:
        """Close the file; what it holds stays."""
        self._stream.close()

    @property
    def sha256(self) -> str:
        """Lower-case hex SHA-256 of what came so far."""
        return self._hash.hexdigest()

    def _opened(self) -> BinaryIO:
        with full_disk_is_no_space():
            return self.path.open("wb", buffering=0)
