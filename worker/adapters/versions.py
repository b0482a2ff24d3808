"""Which adapter version an artifact holds, as its own header says: what a request was resolved to must be that.

An artifact is named by the digest of its bytes, so what was read once stays true, whatever the cache evicts. That goes
for its sizes too: a file that has left can be described to the engine, which may have the adapter.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from common.adapter_format.reading import KEY
from common.adapter_format.tensor_file import MAX_HEADER_BYTES
from loraplex.errors import ArtifactUnreachable, CorruptArtifact, VersionMismatch
from loraplex.safetensors_header import LENGTH_BYTES
from worker.mailbox import AdapterFile

UNREADABLE_FILE: Final = frozenset({CorruptArtifact.reason, ArtifactUnreachable.reason})
"""Reasons by which the engine says that an adapter's file is not what it was when it was verified."""
_KEPT: Final = 8192


class Versions:
    """Remembers the versions of the artifacts asked for last."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[str, AdapterFile]] = OrderedDict()

    async def check(self, file: AdapterFile, version_digest: str) -> None:
        """Compare a verified file with what a request names. Raises VersionMismatch.

        A file without a readable header passes: the engine refuses it, and tells what is wrong with it.
        """
        if file.artifact_digest not in self._known:
            try:
                held = await asyncio.to_thread(_read_version_digest, Path(file.path))
            except (KeyError, TypeError, ValueError, RecursionError, OSError):
                return
            self._known[file.artifact_digest] = held, file
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)
        self.recall(file.artifact_digest, version_digest)

    def recall(self, artifact_digest: str, version_digest: str) -> AdapterFile | None:
        """Return an artifact's file as one that has left the disk; None where it is unknown. Raises VersionMismatch."""
        known = self._known.get(artifact_digest)
        if known is None:
            return None
        self._known.move_to_end(artifact_digest)
        held, file = known
        if held != version_digest:
            raise VersionMismatch(
                f"artifact {artifact_digest[:12]} holds adapter version {held[:12]}, and the request was "
                f"resolved to {version_digest[:12]}; register the adapter again",
                field="adapter.version_digest",
                expected=version_digest,
                actual=held,
            )
        return replace(file, on_disk=False)


def _read_version_digest(file: Path) -> str:
    """Return the version that a packed file says it holds. Checks nothing else: whoever loads the file does."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError("not a header")
        header = json.loads(stream.read(length))
    return str(json.loads(header["__metadata__"][KEY])["version_digest"])
