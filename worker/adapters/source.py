"""Where artifacts come from: the registry's DownloadArtifact.

Owns the channel to the registry and the meaning of its failures. Knows nothing of disks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Final, Protocol, Self

import grpc
import structlog
from grpc import aio

from common import tracing
from common.rpc import open_channel
from loraplex.credentials import Metadata
from loraplex.errors import ArtifactNotFound, ArtifactUnreachable, CorruptArtifact, LoraplexError, from_rpc_error
from loraplex.registry.v1.adapter_pb2 import DownloadArtifactRequest, DownloadArtifactResponse
from loraplex.registry.v1.adapter_pb2_grpc import AdapterServiceStub

log = structlog.get_logger(__name__)

_METHOD: Final = "loraplex.registry.v1.AdapterService/DownloadArtifact"

_FINAL_CODES: Final = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.DATA_LOSS,
    }
)
"""Statuses that trying again does not change."""


class SourceInterrupted(Exception):
    """The source cannot be reached, or went away in the middle; trying again may help."""


@dataclass(frozen=True, slots=True)
class ArtifactStream:
    """An artifact being read: its whole size in bytes, and its bytes from the offset that was asked for."""

    size_bytes: int
    chunks: AsyncIterator[bytes]


class ArtifactSource(Protocol):
    """A place to read artifacts from by digest."""

    def open(self, artifact_digest: str, offset: int) -> AbstractAsyncContextManager[ArtifactStream]:
        """Open an artifact at `offset`.

        Raises ArtifactNotFound, SourceInterrupted (also while chunks are read), or another LoraplexError that trying
        again does not change.
        """
        ...


class RegistrySource:
    """Reads artifacts from a registry over one channel; `async with` owns it. `credentials` go with every call.

    `on_reachable` hears when the registry can be reached again.
    """

    def __init__(
        self,
        address: str,
        *,
        credentials: Metadata = (),
        stall_s: float = 15.0,
        on_reachable: Callable[[], None] = lambda: None,
    ) -> None:
        self._address = address
        self._credentials = credentials
        self._stall_s = stall_s
        self._on_reachable = on_reachable
        self._channel = open_channel(address)
        self._stub = AdapterServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def follow_connection(self) -> None:
        """Log when the registry can and cannot be reached, for ever; a worker needs it only for new adapters."""
        reachable: bool | None = None
        while True:
            state = self._channel.get_state(try_to_connect=True)
            if state is grpc.ChannelConnectivity.READY and reachable is not True:
                reachable = True
                log.info("registry.reachable", address=self._address)
                self._on_reachable()
            elif state is grpc.ChannelConnectivity.TRANSIENT_FAILURE and reachable is not False:
                reachable = False
                log.warning(
                    "registry.waiting",
                    address=self._address,
                    meaning="it cannot be reached; cached adapters are served, others wait for it",
                )
            await self._channel.wait_for_state_change(state)

    @asynccontextmanager
    async def open(self, artifact_digest: str, offset: int) -> AsyncIterator[ArtifactStream]:
        """See `ArtifactSource`."""
        span = tracing.start_client(_METHOD, {"rpc.system.name": "grpc", "rpc.method": _METHOD})
        request = DownloadArtifactRequest(artifact_digest=artifact_digest, offset=offset)
        call = self._stub.DownloadArtifact(request, metadata=(*self._credentials, *tracing.outgoing(span)))
        try:
            first = await self._read(call, artifact_digest)
            if first is None or first.WhichOneof("part") != "info":
                raise SourceInterrupted("the registry sent no artifact facts")  # noqa: TRY301
            yield ArtifactStream(first.info.size_bytes, self._chunks(call, artifact_digest))
        except BaseException as error:
            tracing.mark(span, error)
            raise
        finally:
            span.end()
            call.cancel()

    async def _chunks(
        self, call: aio.UnaryStreamCall[DownloadArtifactRequest, DownloadArtifactResponse], artifact_digest: str
    ) -> AsyncIterator[bytes]:
        while (part := await self._read(call, artifact_digest)) is not None:
            yield part.data

    async def _read(
        self, call: aio.UnaryStreamCall[DownloadArtifactRequest, DownloadArtifactResponse], artifact_digest: str
    ) -> DownloadArtifactResponse | None:
        try:
            async with asyncio.timeout(self._stall_s):
                part = await call.read()
        except TimeoutError as error:
            raise SourceInterrupted(f"the registry sent nothing for {self._stall_s:g} s") from error
        except aio.AioRpcError as error:
            raise _meaning(error, artifact_digest) from error
        return part if isinstance(part, DownloadArtifactResponse) else None


def _meaning(error: aio.AioRpcError, artifact_digest: str) -> Exception:
    if error.code() is grpc.StatusCode.NOT_FOUND:
        return ArtifactNotFound(
            f"the registry has no artifact {artifact_digest}; the adapter may have been deleted",
            artifact_digest=artifact_digest,
        )
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:  # the cluster's fault, not the client's
        return ArtifactUnreachable("the registry refuses this worker's cluster token; both need the same one")
    typed: LoraplexError = from_rpc_error(error)
    if isinstance(typed, ArtifactUnreachable):  # its folder and the remedy are for operators
        log.error("registry.artifact_missing", artifact=artifact_digest, registry=typed.message)
        return ArtifactUnreachable(
            f"adapter artifact {artifact_digest[:12]} is registered, but the registry does not have its file; the "
            "worker's log tells more",
            artifact_digest=artifact_digest,
        )
    if error.code() in _FINAL_CODES or isinstance(typed, CorruptArtifact):
        return typed
    return SourceInterrupted(f"{error.code().name}: {error.details()}")
