"""A real router in this process, and the waits of its tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from grpc import aio

from common.rpc import open_channel
from loraplex.router.v1 import inference_pb2, inference_pb2_grpc, models_pb2_grpc
from router.server import Router
from router.settings import RouterSettings


@dataclass
class RunningRouter:
    """A router in this process and clients to it."""

    router: Router
    channel: aio.Channel

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.router.http_port}"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.router.grpc_port}"

    @property
    def inference(self) -> inference_pb2_grpc.InferenceServiceAsyncStub:
        return inference_pb2_grpc.InferenceServiceStub(self.channel)

    @property
    def models(self) -> models_pb2_grpc.ModelServiceAsyncStub:
        return models_pb2_grpc.ModelServiceStub(self.channel)

    async def generate(
        self, model: str, *, prompt: str = "Hi", timeout_s: float | None = 30.0, metadata: Any = (), **fields: Any
    ) -> list[inference_pb2.GenerateResponse]:
        request = inference_pb2.GenerateRequest(model=model, prompt=prompt, **fields)
        return [event async for event in self.inference.Generate(request, timeout=timeout_s, metadata=metadata)]

    async def until_workers(self, count: int, timeout_s: float = 30.0) -> None:
        """Wait until this many workers are reachable."""
        await eventually(
            lambda: sum(view.state.value != "unreachable" for view in self.router.fleet.views()) == count, timeout_s
        )


async def eventually(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait for a condition of another part that offers no event to wait for."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running_router(
    registry: str, *workers: str, ready: bool = True, revision_wait_s: float = 30.0, **settings: Any
) -> AsyncIterator[RunningRouter]:
    """Run a router on free ports until the block ends; then it must stop in time.

    It waits for a revision that a request wants for `revision_wait_s`: a machine that stands still makes none late.
    """
    defaults: dict[str, Any] = {
        "port": 0,
        "http_port": 0,
        "registry": registry,
        "workers": ",".join(workers) or "127.0.0.1:1",
        "drain_delay_s": 0.0,
        "drain_timeout_s": 0.5,
    }
    router = Router(RouterSettings(**(defaults | settings)))
    wait = router.catalog.wait_for_revision

    async def wait_for_revision(revision: int, timeout_s: float = revision_wait_s) -> None:
        await wait(revision, timeout_s)

    setattr(router.catalog, "wait_for_revision", wait_for_revision)  # noqa: B010 - a method, as far as types go
    stop, bound = asyncio.Event(), asyncio.Event()
    running = asyncio.create_task(router.run(stop, bound.set))
    waiting = asyncio.create_task(bound.wait())
    await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED, timeout=30)
    if not bound.is_set():
        waiting.cancel()
        running.cancel()
        await running
    channel = open_channel(f"127.0.0.1:{router.grpc_port}")
    handle = RunningRouter(router, channel)
    try:
        if ready:
            async with asyncio.timeout(30):
                await router.catalog.ready.wait()
            if workers:
                await handle.until_workers(len(workers))
        yield handle
    finally:
        await channel.close()
        stop.set()
        async with asyncio.timeout(30):
            await running


def code_of(error: grpc.RpcError) -> grpc.StatusCode:
    assert isinstance(error, aio.AioRpcError)
    return error.code()
