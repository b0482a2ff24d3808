"""Registering an adapter from a PEFT folder: the local check, and the upload as a stream of parts.

Checks only what spares a useless upload (a folder, its two files, no pickles); whether the adapter fits its base is the
registry's business. Reads no weights into memory beyond one part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from loraplex.errors import InvalidAdapter, InvalidName, UnsupportedAdapter
from loraplex.registry.v1 import adapter_pb2

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
_PICKLES: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
PART_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file to upload."""

    name: str
    path: Path
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """A PEFT folder that is worth uploading."""

    path: Path
    files: tuple[LocalFile, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes to upload."""
        return sum(file.size_bytes for file in self.files)


def read_adapter_folder(path: Path) -> AdapterFolder:
    """Check a PEFT folder and hash its files. Raises InvalidAdapter or UnsupportedAdapter, naming file and remedy."""
    if not path.exists():
        raise InvalidAdapter(f"{path} does not exist; give the folder that PEFT's save_pretrained wrote", field="path")
    if not path.is_dir():
        raise InvalidAdapter(
            f"{path} is a file; give the folder that holds {CONFIG} and {WEIGHTS}, here probably {path.parent}",
            field="path",
        )
    if not (path / WEIGHTS).is_file():
        pickles = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
        if pickles:
            raise UnsupportedAdapter(
                f"{path} holds its weights as a pickle ({pickles[0]}), which could run code when opened and is never "
                "read; save the adapter again with PEFT's save_pretrained, which writes safetensors",
                field="path",
                file=pickles[0],
            )
    missing = [name for name in (CONFIG, WEIGHTS) if not (path / name).is_file()]
    if missing:
        raise InvalidAdapter(
            f"{path} is not a PEFT adapter folder: it holds no {' and no '.join(missing)}; "
            "give the folder that PEFT's save_pretrained wrote",
            field="path",
        )
    return AdapterFolder(path, (_local_file(path / CONFIG), _local_file(path / WEIGHTS)))


def _local_file(path: Path) -> LocalFile:
    try:
        with path.open("rb") as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
            return LocalFile(path.name, path, stream.tell(), sha256)
    except OSError as error:
        raise InvalidAdapter(f"{path} cannot be read: {error.strerror}", field="path") from error


def upload_parts(
    folder: AdapterFolder, name: str, base_id: str = "", progress: Callable[[int], None] = lambda _: None
) -> Iterator[adapter_pb2.UploadArtifactRequest]:
    """Yield the upload's messages; `progress` is told the bytes of each part as it is handed over.

    A file that changes meanwhile is caught by the registry, which checks sizes and hashes.
    """
    try:
        header = adapter_pb2.UploadHeader(name=name, base_id=base_id)
    except ValueError as error:  # a lone surrogate
        raise InvalidName(f"the name cannot be sent: {error}", field="name") from error
    yield adapter_pb2.UploadArtifactRequest(header=header)
    for file in folder.files:
        yield adapter_pb2.UploadArtifactRequest(
            file_header=adapter_pb2.FileHeader(name=file.name, size_bytes=file.size_bytes, sha256=file.sha256)
        )
        with file.path.open("rb") as stream:
            while part := stream.read(PART_BYTES):
                yield adapter_pb2.UploadArtifactRequest(data=part)
                progress(len(part))
