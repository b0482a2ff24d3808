"""The artifact folder: packed files under their SHA-256, and the incoming folders in which they are made.

A file appears under its digest whole or not at all: it is written elsewhere on the same file system, synced, then
renamed. Knows nothing of SQL; who still needs which digest is asked of the store.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

from common.disk import is_full, sync_folder
from loraplex.digests import is_digest
from loraplex.errors import ArtifactNotFound, ArtifactUnreachable, InvalidParameter, NoSpace

MISSING_REMEDY: Final = (
    "a database belongs to one registry and its folder: stop the other registry on it, give back the folder that has "
    "the file, or register the adapter again (loraplex adapter add)"
)


class ArtifactFolder:
    """Owns `artifacts/` and `incoming/` below the state folder. Its methods block; call them from threads."""

    def __init__(self, state_dir: Path) -> None:
        self._artifacts = state_dir / "artifacts"
        self._incoming = state_dir / "incoming"
        self.partial = state_dir / "partial"
        """For what broken uploads leave behind."""
        self.give_way: Callable[[], None] = lambda: None
        """Called where the disk is short of space, before anybody is refused for that."""

    def open(self) -> None:
        """Make the folders and remove what an earlier process left half made."""
        with full_disk_is_no_space():
            self._artifacts.mkdir(parents=True, exist_ok=True)
            for folder in (self._incoming, self.partial):
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(exist_ok=True)

    @property
    def folder(self) -> Path:
        """Where the artifacts are."""
        return self._artifacts

    def missing(self, digest: str) -> ArtifactUnreachable:
        """Return the error for an artifact of a registered version that is not here."""
        return ArtifactUnreachable(
            f"artifact {digest} is registered, but its file is not in this registry's folder {self._artifacts}; "
            f"{MISSING_REMEDY}",
            artifact_digest=digest,
        )

    def new_incoming(self) -> Path:
        """Make a folder for one upload; the caller removes it."""
        with full_disk_is_no_space():
            return Path(tempfile.mkdtemp(dir=self._incoming))

    def require_space(self, needed_bytes: int) -> None:
        """Raise NoSpace where the disk has less than `needed_bytes` left."""
        free_bytes = shutil.disk_usage(self._incoming).free
        if free_bytes < needed_bytes:
            self.give_way()
            free_bytes = shutil.disk_usage(self._incoming).free
        if free_bytes < needed_bytes:
            raise NoSpace(
                f"the registry's disk has {free_bytes} bytes left and this upload needs about {needed_bytes}; "
                "delete adapters or enlarge the disk",
                free_bytes=free_bytes,
                needed_bytes=needed_bytes,
            )

    def sync(self, file: Path) -> None:
        """Force a file's bytes to the disk, so that publishing it is quick."""
        with full_disk_is_no_space(), file.open("rb") as stream:
            os.fsync(stream.fileno())

    def publish(self, file: Path, digest: str) -> None:
        """Move a synced incoming file to its digest. A file that is there already is replaced by its equal."""
        target = self._path(digest)
        with full_disk_is_no_space():
            target.parent.mkdir(exist_ok=True)
            file.replace(target)
            for folder in (target.parent, self._artifacts):
                sync_folder(folder)

    def open_artifact(self, digest: str) -> tuple[BinaryIO, int]:
        """Return an open file and its size in bytes; it stays readable when the artifact is removed meanwhile.

        Raises InvalidParameter for what is no digest and ArtifactNotFound.
        """
        if not is_digest(digest):
            raise InvalidParameter("artifact_digest must be 64 lower-case hex characters", field="artifact_digest")
        try:
            stream = self._path(digest).open("rb")
        except FileNotFoundError as error:
            raise ArtifactNotFound(f"no artifact {digest} is stored here", artifact_digest=digest) from error
        return stream, os.fstat(stream.fileno()).st_size

    def file(self, digest: str) -> Path:
        """Return where an artifact of a registered version lies. Raises ArtifactUnreachable where it is missing."""
        file = self._path(digest)
        if not file.is_file():
            raise self.missing(digest)
        return file

    def remove(self, digest: str) -> None:
        """Remove an artifact, if it is there."""
        with suppress(FileNotFoundError):
            self._path(digest).unlink()

    def digests(self) -> Iterator[str]:
        """Walk all stored digests."""
        for file in self._artifacts.glob("??/*.safetensors"):
            if is_digest(file.stem):
                yield file.stem

    def _path(self, digest: str) -> Path:
        return self._artifacts / digest[:2] / f"{digest}.safetensors"


@contextmanager
def full_disk_is_no_space() -> Iterator[None]:
    """Turn the operating system's "no space left" into NoSpace."""
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise NoSpace("the registry's disk is full; delete adapters, or free some space on it") from error
        raise
