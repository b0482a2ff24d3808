"""A PEFT adapter folder on this machine: its two files, and the check that spares a useless upload.

Looks for the folder, its files and pickles; whether the adapter fits its base is the registry's business.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from loraplex.errors import InvalidAdapter, UnsupportedAdapter

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
PICKLE_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


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
            f"{path} is a file; give the folder that holds {CONFIG_FILE} and {WEIGHTS_FILE}, here probably "
            f"{path.parent}",
            field="path",
        )
    if not (path / WEIGHTS_FILE).is_file():
        pickles = sorted(file.name for file in path.iterdir() if file.suffix in PICKLE_SUFFIXES)
        if pickles:
            raise UnsupportedAdapter(
                f"{path} holds its weights as a pickle ({pickles[0]}), which could run code when opened and is never "
                "read; save the adapter again with PEFT's save_pretrained, which writes safetensors",
                field="path",
                file=pickles[0],
            )
    missing = [name for name in (CONFIG_FILE, WEIGHTS_FILE) if not (path / name).is_file()]
    if missing:
        raise InvalidAdapter(
            f"{path} is not a PEFT adapter folder: it holds no {' and no '.join(missing)}; "
            "give the folder that PEFT's save_pretrained wrote",
            field="path",
        )
    return AdapterFolder(path, (_local_file(path / CONFIG_FILE), _local_file(path / WEIGHTS_FILE)))


def _local_file(path: Path) -> LocalFile:
    try:
        with path.open("rb") as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
            return LocalFile(path.name, path, stream.tell(), sha256)
    except OSError as error:
        raise InvalidAdapter(f"{path} cannot be read: {error.strerror}", field="path") from error
