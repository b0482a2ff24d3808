"""The grammar of an upload, enforced part by part while the files are written down.

header (file_header data*)*, where the files are adapter_config.json and adapter_model.safetensors, each once, with the
size and SHA-256 that its header told. The first message, the upload's header, is read by the caller. A file may go on
where an upload that broke off has left it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from common.tenancy import DEFAULT_TENANT
from loraplex.digests import is_digest
from loraplex.errors import (
    CorruptArtifact,
    FailedPrecondition,
    InvalidAdapter,
    InvalidParameter,
    InvalidRequest,
    TooLarge,
    UnsupportedAdapter,
)
from loraplex.peft_folder import CONFIG_FILE, PICKLE_SUFFIXES, WEIGHTS_FILE
from loraplex.registry.v1 import adapter_pb2
from registry.artifacts import ArtifactFolder, full_disk_is_no_space
from registry.incoming import MAX_CONFIG_BYTES, IncomingFile, ReceivedFiles
from registry.partials import FileKey, PartialUploads

_FILES: Final = (CONFIG_FILE, WEIGHTS_FILE)
_MAX_DATA_BYTES: Final = 2**20


class Truncated(CorruptArtifact):
    """The stream ended before a file did: its client has gone, or cannot count."""


class UploadReceiver:
    """Takes the parts of one upload in order and writes its files into `folder`. Its methods block.

    A refusal is a LoraplexError; after one the receiver is done with. `close` may be called at any time.
    """

    def __init__(
        self, folder: Path, artifacts: ArtifactFolder, partials: PartialUploads, *, max_upload_bytes: int
    ) -> None:
        self._folder = folder
        self._artifacts = artifacts
        self._partials = partials
        self._max_upload_bytes = max_upload_bytes
        self._announced_bytes = 0
        self._header: adapter_pb2.FileHeader | None = None
        self._file: IncomingFile | None = None
        self._done: dict[str, tuple[FileKey, IncomingFile]] = {}

    def take(self, part: adapter_pb2.UploadArtifactRequest) -> None:
        """Take the next part."""
        match part.WhichOneof("part"):
            case "file_header":
                self._finish_file()
                self._begin_file(part.file_header)
            case "data":
                self._append(part.data)
            case "header":
                raise InvalidRequest("the upload's header was sent twice; it comes once, first", field="header")
            case _:
                raise InvalidRequest("a message of the upload is empty", field="part")

    def finish(self) -> ReceivedFiles:
        """End the upload. Raises where a file is missing or not whole."""
        self._finish_file()
        missing = [name for name in _FILES if name not in self._done]
        if missing:
            raise InvalidAdapter(
                f"{' and '.join(missing)} missing: an adapter folder has {CONFIG_FILE} and {WEIGHTS_FILE}, as PEFT's "
                "save_pretrained writes them",
                field=missing[0],
            )
        return ReceivedFiles((self._folder / CONFIG_FILE).read_bytes(), self._folder / WEIGHTS_FILE)

    def close(self) -> None:
        """Close the file that is being written, if one is."""
        if self._file is not None:
            self._file.close()

    def keep(self) -> None:
        """Close, and keep what has come for an upload that goes on with it."""
        self.close()
        if self._file is not None and self._header is not None:
            self._partials.keep(_key(self._header), self._file)
        for key, file in self._done.values():
            self._partials.keep(key, file)

    def _begin_file(self, header: adapter_pb2.FileHeader) -> None:
        check_header(header)
        if header.name in self._done:
            raise InvalidRequest(f"{header.name} was sent twice", field="file_header.name")
        self._announced_bytes += header.size_bytes
        if self._announced_bytes > self._max_upload_bytes:
            raise TooLarge(
                f"the upload has at least {self._announced_bytes} bytes; at most {self._max_upload_bytes} are accepted",
                field="file_header.size_bytes",
                limit=self._max_upload_bytes,
            )
        path = self._folder / header.name
        self._file = self._continued(header, path) if header.offset else IncomingFile(path)
        self._header = header
        # The upload, the exact factors, and the artifact packed from them, which has at most half their size.
        self._artifacts.require_space(5 * header.size_bytes // 2 - header.offset)

    def _continued(self, header: adapter_pb2.FileHeader, path: Path) -> IncomingFile:
        file = self._partials.take(_key(header), path)
        if file is None or file.size_bytes != header.offset:
            if file is not None:
                file.close()
                self._partials.keep(_key(header), file)
            raise FailedPrecondition(
                f"{header.name} cannot go on from {header.offset}: that much of it is not here; ask again how much is",
                field="file_header.offset",
            )
        return file

    def _append(self, data: bytes) -> None:
        if self._header is None or self._file is None:
            raise InvalidRequest("data came before a file_header", field="data")
        if len(data) > _MAX_DATA_BYTES:
            raise InvalidParameter(f"a data message has {len(data)} bytes; at most {_MAX_DATA_BYTES}", field="data")
        if self._file.size_bytes + len(data) > self._header.size_bytes:
            raise InvalidRequest(
                f"{self._header.name} has more data than the {self._header.size_bytes} bytes of its header",
                field="file_header.size_bytes",
            )
        self._file.append(data)

    def _finish_file(self) -> None:
        if self._header is None or self._file is None:
            return
        header, file = self._header, self._file
        with full_disk_is_no_space():
            file.close()
        if file.size_bytes != header.size_bytes:
            raise Truncated(
                f"{header.name} is truncated: {file.size_bytes} of {header.size_bytes} bytes came",
                file=header.name,
            )
        if file.sha256 != header.sha256:
            raise CorruptArtifact(
                f"{header.name} arrived with SHA-256 {file.sha256}, not {header.sha256} as announced; send it again",
                file=header.name,
            )
        self._done[header.name] = (_key(header), file)
        self._header = self._file = None


def check_header(header: adapter_pb2.FileHeader) -> None:
    """Raise for a header that announces no file of an adapter."""
    if header.name not in _FILES:
        raise _foreign_file(header.name)
    if not is_digest(header.sha256):
        raise InvalidParameter(
            f"the sha256 of {header.name} must be 64 lower-case hex characters", field="file_header.sha256"
        )
    if header.name == CONFIG_FILE and header.size_bytes > MAX_CONFIG_BYTES:
        raise TooLarge(
            f"{CONFIG_FILE} has {header.size_bytes} bytes; at most {MAX_CONFIG_BYTES} are accepted",
            field="file_header.size_bytes",
            limit=MAX_CONFIG_BYTES,
        )


def found(request: adapter_pb2.FindUploadRequest, partials: PartialUploads) -> adapter_pb2.FindUploadResponse:
    """Return how much of each file is here; blocks for a moment."""
    if len(request.files) > len(_FILES):
        raise InvalidRequest(f"an upload has at most {len(_FILES)} files", field="files")
    for header in request.files:
        check_header(header)
    return adapter_pb2.FindUploadResponse(offsets=[partials.size_bytes(_key(header)) for header in request.files])


def _key(header: adapter_pb2.FileHeader) -> FileKey:
    return FileKey(DEFAULT_TENANT, header.name, header.size_bytes, header.sha256)


def _foreign_file(name: str) -> InvalidAdapter:
    shown = json.dumps(name[:80])
    if name.endswith(PICKLE_SUFFIXES):
        return UnsupportedAdapter(
            f"{shown} is a pickle, which can run code when loaded and is never accepted; save the adapter as "
            f"{WEIGHTS_FILE}: save_pretrained(..., safe_serialization=True)",
            field="file_header.name",
        )
    return InvalidAdapter(
        f"{shown} is not a file of an adapter; only {' and '.join(_FILES)} are accepted, without any folder",
        field="file_header.name",
    )
