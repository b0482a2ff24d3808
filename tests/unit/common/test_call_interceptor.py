"""Every RPC is counted by method and code when it ends, however it ends, and open ones while they last."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from common.activity import Activity
from common.call_interceptor import CallInterceptor, CallMetrics, is_standing
from common.rpc import Server, open_channel
from loraplex.errors import NotFound
from loraplex.router.v1 import inference_pb2, inference_pb2_grpc, models_pb2, models_pb2_grpc

GENERATE = "/loraplex.router.v1.InferenceService/Generate"
LIST = "/loraplex.router.v1.ModelService/ListModels"


class Inference(inference_pb2_grpc.InferenceServiceServicer):
    async def Generate(self, request: Any, context: Any) -> AsyncIterator[inference_pb2.GenerateResponse]:
        yield inference_pb2.GenerateResponse()
        match request.model:
            case "unknown":
                raise NotFound("no such model")
            case "slow":
                await asyncio.sleep(60)
            case "endless":
                while True:
                    yield inference_pb2.GenerateResponse()


class Models(models_pb2_grpc.ModelServiceServicer):
    async def ListModels(self, request: Any, context: Any) -> models_pb2.ListModelsResponse:
        return models_pb2.ListModelsResponse()

    async def GetModel(self, request: Any, context: Any) -> models_pb2.GetModelResponse:
        return models_pb2.GetModelResponse()


@dataclass
class Served:
    channel: aio.Channel
    registry: CollectorRegistry
    metrics: CallMetrics
    activity: Activity

    def count(self, method: str, code: str) -> float | None:
        return self.registry.get_sample_value("loraplex_rpc_requests_total", {"method": method, "code": code})

    async def settled(self) -> None:
        """Wait until no request is open; gRPC has no event for it."""
        async with asyncio.timeout(60):
            while self.activity.num_requests or self.activity.num_tasks:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def generate(self, model: str, timeout: float | None = None) -> Any:
        stub = inference_pb2_grpc.InferenceServiceStub(self.channel)
        return stub.Generate(inference_pb2.GenerateRequest(model=model), timeout=timeout)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    registry, activity = CollectorRegistry(), Activity()
    metrics = CallMetrics(registry)
    server = Server(
        [
            lambda s: inference_pb2_grpc.add_InferenceServiceServicer_to_server(Inference(), s),
            lambda s: models_pb2_grpc.add_ModelServiceServicer_to_server(Models(), s),
        ],
        [],
        outer=[CallInterceptor(metrics, activity)],
    )
    port = await server.start("127.0.0.1", 0)
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield Served(channel, registry, metrics, activity)
    await server.stop(0)


async def test_calls_are_counted_by_method_and_code(served: Served) -> None:
    assert [True async for _ in served.generate("any")] == [True]
    with pytest.raises(aio.AioRpcError):
        [True async for _ in served.generate("unknown")]
    await models_pb2_grpc.ModelServiceStub(served.channel).ListModels(models_pb2.ListModelsRequest())
    await served.settled()
    assert (served.count(GENERATE, "OK"), served.count(GENERATE, "NOT_FOUND")) == (1, 1)
    assert served.count(LIST, "OK") == 1
    assert served.registry.get_sample_value("loraplex_rpc_seconds_count", {"method": GENERATE}) == 2
    assert served.registry.get_sample_value("loraplex_rpc_open", {"method": GENERATE}) == 0


@pytest.mark.parametrize("model", ["slow", "endless"])  # suspended in the handler; suspended in a write
async def test_a_client_that_leaves_is_counted_out_and_nothing_is_left_of_it(served: Served, model: str) -> None:
    call = served.generate(model)
    await call.read()
    assert (served.metrics.num_open(GENERATE), served.activity.num_requests) == (1, 1)
    assert served.activity.num_tasks >= 1
    call.cancel()
    await served.settled()
    assert served.metrics.num_open(GENERATE) == 0
    assert served.count(GENERATE, "CANCELLED") == 1


async def test_a_deadline_that_passes_has_its_own_code(served: Served) -> None:
    for timeout in (1, 4, 16, 64):
        before = served.count(GENERATE, "DEADLINE_EXCEEDED") or 0
        call = served.generate("slow", timeout=timeout)
        try:
            await call.read()
        except aio.AioRpcError:  # it passed before the server began, and counted, or just after
            await served.settled()
            continue
        with pytest.raises(aio.AioRpcError):
            await call.read()
        await served.settled()
        assert served.count(GENERATE, "DEADLINE_EXCEEDED") == before + 1
        return
    pytest.fail("no call began within its time")


async def test_methods_that_do_not_exist_share_one_label(served: Served) -> None:
    for number in range(3):
        call: Any = served.channel.unary_unary(f"/no.Such/Method{number}")
        with pytest.raises(aio.AioRpcError) as caught:
            await call(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert served.count("unknown", "UNIMPLEMENTED") == 3


async def test_health_watches_are_counted_as_calls_but_not_as_open_requests(served: Served) -> None:
    watch = health_pb2_grpc.HealthStub(served.channel).Watch(health_pb2.HealthCheckRequest())
    await watch.read()
    assert served.metrics.num_open("/grpc.health.v1.Health/Watch") == 1
    assert (served.activity.num_requests, served.activity.num_tasks) == (0, 0)
    watch.cancel()


def test_watches_stand_and_requests_do_not() -> None:
    assert is_standing("/loraplex.worker.v1.WorkerService/WatchStatus")
    assert is_standing("/loraplex.registry.v1.AdapterService/Watch")
    assert not is_standing(GENERATE)
    assert not is_standing("/loraplex.registry.v1.AdapterService/UploadArtifact")
