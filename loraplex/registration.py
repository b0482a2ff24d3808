"""The upload that registers an adapter, as a stream of parts. Holds no more of the weights in memory than one part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from loraplex.errors import InvalidName
from loraplex.peft_folder import AdapterFolder
from loraplex.registry.v1 import adapter_pb2

PART_BYTES: Final = 2**20


def upload_parts(
    folder: AdapterFolder,
    name: str,
    base_id: str = "",
    progress: Callable[[int], None] = lambda _: None,
    form: adapter_pb2.AdapterFormat.ValueType = adapter_pb2.ADAPTER_FORMAT_UNSPECIFIED,
) -> Iterator[adapter_pb2.UploadArtifactRequest]:
    """Yield the upload's messages; `progress` is told the bytes of each part as it is handed over.

    A file that changes meanwhile is caught by the registry, which checks sizes and hashes.
    """
    try:
        header = adapter_pb2.UploadHeader(name=name, base_id=base_id, format=form)
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
