"""The guard lets the cluster token in, refuses everything else on every kind of call, and leaves probes alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from common.bearer import bearer_of, cluster_guards, sent_authorization
from common.rpc import Server, open_channel
from loraplex.credentials import bearer
from loraplex.errors import Unauthenticated, from_rpc_error
from loraplex.registry.v1 import adapter_pb2, adapter_pb2_grpc

TOKEN = "the-cluster-token-of-this-test"
SERVICE = adapter_pb2.DESCRIPTOR.services_by_name["AdapterService"]


class Adapters(adapter_pb2_grpc.AdapterServiceServicer):
    """One method of each kind; `reached` counts the calls that came through."""

    reached = 0

    async def GetAdapter(self, request: Any, context: Any) -> adapter_pb2.GetAdapterResponse:
        self.reached += 1
        return adapter_pb2.GetAdapterResponse()

    async def UploadArtifact(self, request_iterator: Any, context: Any) -> adapter_pb2.UploadArtifactResponse:
        self.reached += 1
        async for _ in request_iterator:
            pass
        return adapter_pb2.UploadArtifactResponse()

    async def DownloadArtifact(self, request: Any, context: Any) -> AsyncIterator[adapter_pb2.DownloadArtifactResponse]:
        self.reached += 1
        yield adapter_pb2.DownloadArtifactResponse(data=b"x")

    def FindUpload(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    def ImportAdapter(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    def ListAdapters(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    def UpdateAdapter(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    def RecordEvaluation(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    def PinAdapter(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    def DeleteAdapter(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    def Watch(self, request: Any, context: Any) -> Any:
        raise NotImplementedError


@asynccontextmanager
async def guarded(token: str | None) -> AsyncIterator[tuple[Adapters, aio.Channel]]:
    adapters = Adapters()
    server = Server(
        [lambda s: adapter_pb2_grpc.add_AdapterServiceServicer_to_server(adapters, s)],
        [SERVICE],
        cluster_guards(token),
    )
    port = await server.start("127.0.0.1", 0)
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield adapters, channel
    await server.stop(0)


async def call(channel: aio.Channel, kind: str, metadata: Any) -> None:
    stub = adapter_pb2_grpc.AdapterServiceStub(channel)
    match kind:
        case "unary":
            await stub.GetAdapter(adapter_pb2.GetAdapterRequest(), metadata=metadata, timeout=60)
        case "upload":
            await stub.UploadArtifact(iter([adapter_pb2.UploadArtifactRequest()]), metadata=metadata, timeout=60)
        case "download":
            request = adapter_pb2.DownloadArtifactRequest()
            assert [part async for part in stub.DownloadArtifact(request, metadata=metadata, timeout=60)]


@pytest.mark.parametrize("kind", ["unary", "upload", "download"])
@pytest.mark.parametrize(
    ("authorization", "said"),
    [
        (None, "carries none"),
        (f"Bearer {TOKEN}x", "not the one"),
        (f"Bearer {TOKEN[:-1]}", "not the one"),
        ("Bearer", "not `Bearer"),
        (TOKEN, "not `Bearer"),
        (f"Basic {TOKEN}", "not `Bearer"),
        ("", "not `Bearer"),
    ],
)
async def test_calls_without_the_token_are_refused_before_they_reach_the_service(kind, authorization, said):
    async with guarded(TOKEN) as (adapters, channel):
        with pytest.raises(aio.AioRpcError) as caught:
            await call(channel, kind, () if authorization is None else (("authorization", authorization),))
    error = from_rpc_error(caught.value)
    assert type(error) is Unauthenticated
    assert said in error.message
    assert "LORAPLEX_CLUSTER_TOKEN" in error.message
    assert TOKEN[:-1] not in f"{error.message} {error.metadata}"
    assert adapters.reached == 0


@pytest.mark.parametrize("kind", ["unary", "upload", "download"])
async def test_calls_with_the_token_pass(kind):
    async with guarded(TOKEN) as (adapters, channel):
        await call(channel, kind, bearer(TOKEN))
        await call(channel, kind, (("authorization", f"bearer  {TOKEN} "),))  # schemes have no case
    assert adapters.reached == 2


async def test_without_a_configured_token_nobody_is_asked():
    async with guarded(None) as (adapters, channel):
        await call(channel, "unary", ())
        await call(channel, "unary", bearer("whatever"))
    assert adapters.reached == 2


async def test_health_and_reflection_stay_open():
    async with guarded(TOKEN) as (_, channel):
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE.full_name), timeout=60)
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch = aiter(stub.Watch(health_pb2.HealthCheckRequest(), timeout=60))
        assert (await anext(watch)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        asked = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([ask]), timeout=60)
        services = (await anext(aiter(asked))).list_services_response.service
    assert SERVICE.full_name in {service.name for service in services}


def test_the_secret_of_an_authorization():
    assert bearer_of(None) is None
    assert bearer_of("Bearer abc") == "abc"
    assert bearer_of("Token abc") == ""
    assert sent_authorization(None) is None
    assert sent_authorization((("x", "y"), ("authorization", "Bearer a"), ("authorization", "Bearer b"))) == "Bearer a"
    assert sent_authorization((("authorization", b"bytes"),)) is None
