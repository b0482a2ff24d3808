"""Server spans of gRPC calls, over a real server and a real receiver."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc import aio

from common import trace_export
from common.rpc import Server, open_channel
from common.trace_rpc import is_traced
from common.tracing import tracing
from loraplex.errors import ModelNotFound
from loraplex.router.v1 import inference_pb2, inference_pb2_grpc, models_pb2, models_pb2_grpc
from loraplex.types.v1 import generation_pb2
from tests.otlp_collector import Received, running_collector

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CONTEXT = (("traceparent", f"00-{TRACE}-00f067aa0ba902b7-01"),)
STREAM = "loraplex.router.v1.InferenceService/Generate"
UNARY = "loraplex.router.v1.ModelService/GetModel"


class Service(inference_pb2_grpc.InferenceServiceServicer, models_pb2_grpc.ModelServiceServicer):
    """Does what the model's name says."""

    async def Generate(self, request, context) -> AsyncIterator[inference_pb2.GenerateResponse]:
        if request.model == "refuse":
            raise ModelNotFound("secret")
        if request.model == "break":
            raise ZeroDivisionError("secret")
        yield inference_pb2.GenerateResponse(delta=generation_pb2.Delta(text="x"))
        if request.model == "wait":
            await asyncio.Event().wait()
        while request.model == "flood":
            yield inference_pb2.GenerateResponse(delta=generation_pb2.Delta(text="x" * 100_000))

    async def GetModel(self, request, context) -> models_pb2.GetModelResponse:
        if request.name == "refuse":
            raise ModelNotFound("secret")
        return models_pb2.GetModelResponse()

    async def ListModels(self, request, context) -> models_pb2.ListModelsResponse:
        return models_pb2.ListModelsResponse()


@asynccontextmanager
async def served() -> AsyncIterator[aio.Channel]:
    service = Service()
    server = Server(
        [
            lambda server: inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server),
            lambda server: models_pb2_grpc.add_ModelServiceServicer_to_server(service, server),
        ],
        [],
    )
    channel = open_channel(f"127.0.0.1:{await server.start('127.0.0.1', 0)}")
    try:
        yield channel
    finally:
        await channel.close()
        await server.stop(0)


@pytest.fixture(autouse=True)
def _soon_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans go out at once, and the last ones have the time they need."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setattr(trace_export, "FLUSH_S", 60.0)


async def span_of(act: Callable[[aio.Channel], Awaitable[None]]) -> Received:
    """The one span that comes of what `act` does, and of no stop of the server."""
    with running_collector() as collector:
        with tracing("test", collector.endpoint):
            async with served() as channel:
                await act(channel)
                await asyncio.to_thread(collector.wait_for, TRACE, bool, 60)
        (span,) = collector.trace(TRACE)
    assert b"secret" not in b"".join(collector.raw)
    assert span.span.parent_span_id.hex() == "00f067aa0ba902b7"
    assert span.attributes["rpc.system.name"] == "grpc"
    return span


def generate(channel: aio.Channel, model: str, **call: Any) -> Any:
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    return stub.Generate(inference_pb2.GenerateRequest(model=model), metadata=CONTEXT, **call)


async def test_a_stream_that_ends_well() -> None:
    async def act(channel: aio.Channel) -> None:
        assert len([event async for event in generate(channel, "fine")]) == 1

    span = await span_of(act)
    assert (span.name, span.error, span.attributes["rpc.response.status_code"]) == (STREAM, "", "OK")


@pytest.mark.parametrize(
    ("model", "reason", "code"),
    [("refuse", "MODEL_NOT_FOUND", "NOT_FOUND"), ("break", "ZeroDivisionError", "INTERNAL")],
)
async def test_a_stream_that_fails_tells_the_reason(model: str, reason: str, code: str) -> None:
    async def act(channel: aio.Channel) -> None:
        with pytest.raises(grpc.RpcError):
            await generate(channel, model).read()

    span = await span_of(act)
    assert (span.error, span.attributes["rpc.response.status_code"]) == (reason, code)
    assert not span.is_cancelled


@pytest.mark.parametrize("model", ["wait", "flood"])
async def test_a_stream_whose_client_goes_is_cancelled_wherever_its_handler_is(model: str) -> None:
    async def act(channel: aio.Channel) -> None:
        call = generate(channel, model)
        await call.read()
        await asyncio.sleep(0.2)  # the flood's handler is in a write by then
        call.cancel()

    span = await span_of(act)
    assert span.is_cancelled
    assert span.attributes["rpc.response.status_code"] == "CANCELLED"


async def test_a_deadline_is_no_cancellation() -> None:
    async def act(channel: aio.Channel) -> None:
        call = generate(channel, "wait", timeout=4)
        await call.read()  # the server has begun it
        with pytest.raises(grpc.RpcError):
            await call.read()

    span = await span_of(act)
    assert span.error == "DEADLINE_EXCEEDED"
    assert not span.is_cancelled


@pytest.mark.parametrize(("name", "reason", "code"), [("x", "", "OK"), ("refuse", "MODEL_NOT_FOUND", "NOT_FOUND")])
async def test_unary_calls(name: str, reason: str, code: str) -> None:
    async def act(channel: aio.Channel) -> None:
        try:
            await models_pb2_grpc.ModelServiceStub(channel).GetModel(
                models_pb2.GetModelRequest(name=name), metadata=CONTEXT
            )
        except grpc.RpcError:
            assert reason

    span = await span_of(act)
    assert (span.name, span.error, span.attributes["rpc.response.status_code"]) == (UNARY, reason, code)


@pytest.mark.parametrize(
    ("method", "traced"),
    [
        ("/loraplex.router.v1.InferenceService/Generate", True),
        ("/loraplex.registry.v1.AdapterService/UploadArtifact", True),
        ("/loraplex.registry.v1.AdapterService/Watch", False),
        ("/loraplex.worker.v1.WorkerService/WatchStatus", False),
        ("/grpc.health.v1.Health/Check", False),
        ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", False),
    ],
)
def test_requests_are_traced_and_watches_and_probes_are_not(method: str, traced: bool) -> None:
    assert is_traced(method) is traced
