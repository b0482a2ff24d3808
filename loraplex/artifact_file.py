"""An artifact's bytes from the registry into a file, checked against their digest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from loraplex.errors import CorruptArtifact
from loraplex.registry.v1 import adapter_pb2


class ArtifactFile:
    """A file that a download's parts are written to; `with` leaves it there only if they were the artifact, whole."""

    def __init__(
        self, artifact_digest: str, file: Path, progress: Callable[[int, int], None] = lambda _done, _total: None
    ) -> None:
        """`progress` is told the bytes so far, and of all."""
        self._wanted, self._file, self._progress = artifact_digest, file, progress
        self._digest = hashlib.sha256()
        self._done = self._total = 0

    def __enter__(self) -> Self:
        self._stream = self._file.open("wb")
        return self

    def take(self, part: adapter_pb2.DownloadArtifactResponse) -> None:
        """Write a part."""
        if part.WhichOneof("part") == "info":
            self._total = part.info.size_bytes
            return
        self._stream.write(part.data)
        self._digest.update(part.data)
        self._done += len(part.data)
        self._progress(self._done, self._total)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Raise CorruptArtifact where the parts were not the artifact's."""
        self._stream.close()
        if kind is None and self._digest.hexdigest() == self._wanted:
            return
        self._file.unlink(missing_ok=True)
        if kind is None:
            raise CorruptArtifact(
                f"the registry sent {self._done} bytes that are not artifact {self._wanted[:12]}; try again",
                file=self._file.name,
            )
