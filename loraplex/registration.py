"""The upload that registers an adapter: a stream of parts, and what is done where it breaks off.

Holds no more of the weights in memory than one part. A broken upload goes on where the registry has it; the
synchronous and the asynchronous client call, this decides.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, cast

import grpc

from loraplex.errors import FailedPrecondition, InvalidName, carries_details, from_rpc_error
from loraplex.peft_folder import AdapterFolder
from loraplex.registry.v1 import adapter_pb2

PART_BYTES: Final = 2**20
MAX_TRIES: Final = 6
"""Of one upload without a byte more at the registry."""
_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 4.0


class Upload:
    """One upload over as many calls as it takes.

    `progress` is told the bytes of each part as it is handed over, and of what the registry has already; the number is
    negative where a broken connection has lost some. A file that changes meanwhile is caught by the registry, which
    checks sizes and hashes.
    """

    def __init__(
        self,
        folder: AdapterFolder,
        name: str,
        base_id: str = "",
        progress: Callable[[int], None] = lambda _: None,
        form: adapter_pb2.AdapterFormat.ValueType = adapter_pb2.ADAPTER_FORMAT_UNSPECIFIED,
    ) -> None:
        """Prepare it; nothing is sent yet. Raises InvalidName for a name that cannot be sent."""
        try:
            self._header = adapter_pb2.UploadHeader(name=name, base_id=base_id, format=form)
        except ValueError as error:  # a lone surrogate
            raise InvalidName(f"the name cannot be sent: {error}", field="name") from error
        self._folder = folder
        self._progress = progress
        self._told_bytes = 0
        self._most_bytes = 0
        self._call = 0
        self._tries = 0
        self._has_sent = False

    @property
    def question(self) -> adapter_pb2.FindUploadRequest:
        """What asks the registry how much it has."""
        return adapter_pb2.FindUploadRequest(files=self._headers([0] * len(self._folder.files)))

    def offsets(self, answer: adapter_pb2.FindUploadResponse | None) -> Sequence[int]:
        """Return where each file goes on; `answer` is None where the registry knows no such question."""
        files = self._folder.files
        if answer is None or len(answer.offsets) != len(files):
            return [0] * len(files)
        return [min(offset, file.size_bytes) for offset, file in zip(answer.offsets, files, strict=True)]

    def parts(self, offsets: Sequence[int]) -> Iterator[adapter_pb2.UploadArtifactRequest]:
        """Yield one call's messages. Those of an earlier call end."""
        self._call += 1
        call, here_bytes = self._call, sum(offsets)
        if here_bytes > self._most_bytes:
            self._most_bytes, self._tries = here_bytes, 0
        self._tell(here_bytes - self._told_bytes)
        yield adapter_pb2.UploadArtifactRequest(header=self._header)
        for file, header in zip(self._folder.files, self._headers(offsets), strict=True):
            yield adapter_pb2.UploadArtifactRequest(file_header=header)
            with file.path.open("rb") as stream:
                stream.seek(header.offset)
                while part := stream.read(PART_BYTES):
                    self._has_sent = True
                    yield adapter_pb2.UploadArtifactRequest(data=part)
                    if call != self._call:
                        return
                    self._tell(len(part))

    def pause_s(self, error: grpc.RpcError) -> float | None:
        """Return the pause before the next try, None where the failed call is not worth one.

        A registry that was never reached is not waited for.
        """
        if not self._has_sent or not _may_pass(error):
            return None
        self._tries += 1
        if self._tries >= MAX_TRIES:
            return None
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (self._tries - 1))
        return pause_s * random.uniform(0.5, 1.0)  # noqa: S311 - jitter, not a secret

    def _headers(self, offsets: Sequence[int]) -> list[adapter_pb2.FileHeader]:
        return [
            adapter_pb2.FileHeader(name=file.name, size_bytes=file.size_bytes, sha256=file.sha256, offset=offset)
            for file, offset in zip(self._folder.files, offsets, strict=True)
        ]

    def _tell(self, num_bytes: int) -> None:
        if num_bytes:
            self._told_bytes += num_bytes
            self._progress(num_bytes)


def is_unknown_call(error: grpc.RpcError) -> bool:
    """Tell whether the registry is of an older version, which does not know the call."""
    return cast("Any", error).code() is grpc.StatusCode.UNIMPLEMENTED


def _may_pass(error: grpc.RpcError) -> bool:
    code: grpc.StatusCode = cast("Any", error).code()
    if code is grpc.StatusCode.UNAVAILABLE:
        return True
    if not carries_details(error):
        # gRPC's own words. A write into a line that is cut is INTERNAL now and then; our deadline and a cancellation
        # are not to be tried again.
        return code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
    typed = from_rpc_error(error)
    # The registry gave up on a silent connection, or has dropped what it had of a file.
    return code is grpc.StatusCode.DEADLINE_EXCEEDED or (
        isinstance(typed, FailedPrecondition) and typed.field == "file_header.offset"
    )
