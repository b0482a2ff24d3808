"""Errors become statuses, ports are never shared and bounded, health follows the service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common import file_limit
from common.rpc import Server, open_channel
from common.rpc_limits import RpcLimits
from loraplex.errors import FailedPrecondition, LoraplexError, PromptTooLong, QueueFull, Unavailable, from_rpc_error
from loraplex.router.v1 import inference_pb2, inference_pb2_grpc, models_pb2, models_pb2_grpc


class Inference(inference_pb2_grpc.InferenceServiceServicer):
    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        yield inference_pb2.GenerateResponse()
        raise PromptTooLong("the prompt has 9 tokens, the limit is 8", limit=8, length=9, field="prompt")


class Models(models_pb2_grpc.ModelServiceServicer):
    async def GetModel(self, request: models_pb2.GetModelRequest, context: object) -> models_pb2.GetModelResponse:
        raise RuntimeError(f"secret of {request.name}")

    async def ListModels(self, request: models_pb2.ListModelsRequest, context: object) -> models_pb2.ListModelsResponse:
        return models_pb2.ListModelsResponse()


async def _serve(limits: RpcLimits | None = None) -> tuple[Server, int]:
    server = Server(
        [
            lambda s: inference_pb2_grpc.add_InferenceServiceServicer_to_server(Inference(), s),
            lambda s: models_pb2_grpc.add_ModelServiceServicer_to_server(Models(), s),
        ],
        [
            inference_pb2.DESCRIPTOR.services_by_name["InferenceService"],
            models_pb2.DESCRIPTOR.services_by_name["ModelService"],
        ],
        limits=limits,
    )
    return server, await server.start("127.0.0.1", 0)


async def test_typed_errors_arrive_as_the_same_class_with_their_facts() -> None:
    server, port = await _serve()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest())
        with pytest.raises(aio.AioRpcError) as caught:
            async for _ in call:
                pass
    error = from_rpc_error(caught.value)
    assert type(error) is PromptTooLong
    assert error.metadata == {"limit": "8", "length": "9", "field": "prompt"}
    assert error.message == "the prompt has 9 tokens, the limit is 8"
    await server.stop(0)


async def held(port: int) -> aio.Channel:
    """A connection of its own that has served a call."""
    channel = open_channel(f"127.0.0.1:{port}")
    await models_pb2_grpc.ModelServiceStub(channel).ListModels(models_pb2.ListModelsRequest(), wait_for_ready=True)
    return channel


async def turned_away(port: int) -> tuple[grpc.StatusCode, Exception]:
    """What a call on a connection too many ends with. Its exception is dropped here: it holds the call, and that the
    channel, closed or not, which goes on trying and may take the next free place.
    """
    async with open_channel(f"127.0.0.1:{port}") as refused:
        try:
            await models_pb2_grpc.ModelServiceStub(refused).ListModels(models_pb2.ListModelsRequest(), timeout=30)
        except aio.AioRpcError as error:
            return error.code(), from_rpc_error(error)
    raise AssertionError("it was served")


async def test_a_connection_too_many_is_closed_and_the_others_are_served() -> None:
    server, port = await _serve(RpcLimits(max_connections=2))
    first, second = [await held(port) for _ in range(2)]
    code, error = await turned_away(port)
    assert code is grpc.StatusCode.UNAVAILABLE
    assert isinstance(error, Unavailable)
    for channel in (first, second):
        await models_pb2_grpc.ModelServiceStub(channel).ListModels(models_pb2.ListModelsRequest(), timeout=30)
    await first.close()
    async with asyncio.timeout(30):  # the place is free once the server has noticed
        third = await held(port)
    await asyncio.gather(second.close(), third.close())
    await server.stop(0)


async def once_there_is_a_place(call: Callable[[], Awaitable[object]]) -> grpc.StatusCode:
    """Call until there is a place: one that is given back is free once the server has heard of the end."""
    async with asyncio.timeout(60):
        while True:
            try:
                await call()
            except aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    return error.code()
            else:
                return grpc.StatusCode.OK


async def test_a_call_too_many_is_refused_with_the_setting_and_probes_are_answered() -> None:
    server, port = await _serve(RpcLimits(max_calls=2))
    async with open_channel(f"127.0.0.1:{port}") as channel:
        health_stub, models = health_pb2_grpc.HealthStub(channel), models_pb2_grpc.ModelServiceStub(channel)
        watches = [health_stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        for watch in watches:
            await anext(aiter(watch))
        with pytest.raises(aio.AioRpcError) as unary:
            await models.ListModels(models_pb2.ListModelsRequest())
        with pytest.raises(aio.AioRpcError) as stream:
            await anext(aiter(health_stub.Watch(health_pb2.HealthCheckRequest())))
        for caught in (unary, stream):
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            refusal = from_rpc_error(caught.value)
            assert type(refusal) is QueueFull
            assert (refusal.metadata["limit"], "--max-grpc-calls" in refusal.message) == ("2", True)
        await health_stub.Check(health_pb2.HealthCheckRequest())
        watches[0].cancel()
        for _ in range(5):  # whatever ends, however it ends, gives its place back
            listed = await once_there_is_a_place(lambda: models.ListModels(models_pb2.ListModelsRequest()))
            assert listed is grpc.StatusCode.OK
            failed = await once_there_is_a_place(lambda: models.GetModel(models_pb2.GetModelRequest()))
            assert failed is grpc.StatusCode.INTERNAL
    await server.stop(0)


def test_no_more_connections_are_taken_than_half_of_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_limit, "raise_file_limit", lambda: 1024)
    option = "grpc.max_allowed_incoming_connections"
    assert dict(RpcLimits(max_connections=4096).options())[option] == (1024 - 256) // 2
    assert dict(RpcLimits(max_connections=100).options())[option] == 100


async def test_unknown_exceptions_are_opaque() -> None:
    server, port = await _serve()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(aio.AioRpcError) as caught:
            await models_pb2_grpc.ModelServiceStub(channel).GetModel(models_pb2.GetModelRequest(name="x"))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(caught.value.details())
    assert type(from_rpc_error(caught.value)) is LoraplexError
    await server.stop(0)


async def test_a_taken_port_is_refused_by_number() -> None:
    server, port = await _serve()
    other = Server([], [])
    with pytest.raises(FailedPrecondition, match=str(port)):
        await other.start("127.0.0.1", port)
    await server.stop(0)
    await other.stop(0)


async def test_health_follows_set_serving() -> None:
    server, port = await _serve()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for serving in (False, True, False):
            await server.set_serving(serving=serving)
            for service in ("", "loraplex.router.v1.InferenceService"):
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
                expected = (
                    health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
                )
                assert answer.status == expected
    await server.stop(0)


async def test_health_watchers_are_told_and_do_not_hold_the_stop() -> None:
    server, port = await _serve()
    await server.set_serving(serving=True)
    async with open_channel(f"127.0.0.1:{port}") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        answers = aiter(watch)
        seen = [(await anext(answers)).status]
        async with asyncio.timeout(60):
            await server.stop(600)
            seen += [answer.status async for answer in answers]
    assert seen == [health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING]
