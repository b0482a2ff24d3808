"""A registry's DownloadArtifact with faults of choice, between a worker and its registry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum
from typing import Self

import grpc
from grpc import aio

from loraplex.registry.v1 import adapter_pb2, adapter_pb2_grpc

_Context = aio.ServicerContext[adapter_pb2.DownloadArtifactRequest, adapter_pb2.DownloadArtifactResponse]


class Fault(Enum):
    """What is wrong with a download."""

    MISSING = "missing"
    """NOT_FOUND."""
    CORRUPT = "corrupt"
    """A bit is another in each part."""
    STALLED = "stalled"
    """Nothing comes after the first part."""


class FaultySource(adapter_pb2_grpc.AdapterServiceServicer):
    """Passes downloads on to `upstream` (host:port, set before the first), but for artifacts with a fault."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.upstream = ""
        self.faults: dict[str, Fault] = {}

    @classmethod
    @asynccontextmanager
    async def running(cls) -> AsyncIterator[Self]:
        """Serve on a free port of this machine."""
        server = aio.server()
        source = cls(server.add_insecure_port("127.0.0.1:0"))
        adapter_pb2_grpc.add_AdapterServiceServicer_to_server(source, server)
        await server.start()
        try:
            yield source
        finally:
            await server.stop(None)

    async def DownloadArtifact(  # noqa: N802 - gRPC's name
        self, request: adapter_pb2.DownloadArtifactRequest, context: _Context
    ) -> AsyncIterator[adapter_pb2.DownloadArtifactResponse]:
        """See adapter.proto."""
        fault = self.faults.get(request.artifact_digest)
        if fault is Fault.MISSING:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such artifact")
        async with aio.insecure_channel(self.upstream) as channel:
            stub: adapter_pb2_grpc.AdapterServiceAsyncStub = adapter_pb2_grpc.AdapterServiceStub(channel)
            async for part in stub.DownloadArtifact(request):
                if part.data and fault is Fault.STALLED:
                    await asyncio.Event().wait()  # until the caller has had enough
                if part.data and fault is Fault.CORRUPT:
                    part.data = bytes([part.data[0] ^ 1]) + part.data[1:]
                yield part
