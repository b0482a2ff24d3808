"""What is held is bounded and given back: full queues, readers that do not read, clients that leave anywhere."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from grpc import aio

from loraplex import wire
from loraplex.client import AsyncClient, Event
from loraplex.errors import LoraplexError, QueueFull, ResourceExhausted, from_rpc_error
from loraplex.records import Worker
from loraplex.router.v1 import inference_pb2, inference_pb2_grpc
from tests.e2e.fleet import STALL_S, Fleet
from tests.e2e.fleet_calls import BASE, ask, caught_up, is_answered, is_idle, sampling, until_idle, workers_where

RUNNING, PLACES = 4, 6
"""Choices that a worker of the fleet computes, and takes, at a time."""
LONG = 8000
"""Tokens of an answer that takes some ten seconds at least."""
MAX_STUCK_TOKENS = 2000
"""On their way, with 20 alternatives each about 200 bytes, in the windows of two hops."""
MAX_GROWTH_BYTES = 16 * 2**20
FREED_S = 8.0
"""Less than what holds something would take to its end."""


class Leaver:
    """A request whose client leaves when told to. `num_events` counts what came until then."""

    def __init__(self, fleet: Fleet, client: AsyncClient, front: str) -> None:
        self._fleet, self._client, self._front = fleet, client, front
        self.num_events = 0
        self.started = asyncio.Event()

    async def _read(self, model: str, token_ids: list[int], n: int) -> None:
        if self._front == "grpc":
            wanted = sampling(LONG, n=n)
            async for _ in self._client.generate(model, token_ids=token_ids, sampling=wanted):
                self._count()
        else:
            async with self._fleet.stream(model=model, prompt=token_ids, n=n, max_tokens=LONG) as stream:
                async for _ in stream.lines:
                    self._count()

    def _count(self) -> None:
        self.num_events += 1
        self.started.set()

    @asynccontextmanager
    async def asking(self, model: str = BASE, *, prompt_tokens: int = 3, n: int = 1):
        """Ask; at the end of the block the client goes away."""
        token = 40 + ["grpc", "http"].index(self._front)  # a long prompt must not be in the prefix cache already
        task = asyncio.create_task(self._read(model, [token] * prompt_tokens, n))
        try:
            yield self
            assert not task.done()
        finally:
            task.cancel()
            await asyncio.wait([task])


def anywhere(wanted: Callable[[Worker], bool]) -> Callable[[Mapping[str, Worker]], bool]:
    """Return the wish that it holds of some worker."""
    return lambda workers: any(map(wanted, workers.values()))


async def num_events(events: AsyncIterator[Event]) -> int:
    """Read a stream to its end."""
    return len([event async for event in events])


@asynccontextmanager
async def fully_used(client: AsyncClient, per_worker: int):
    """Keep so many choices on each of the two workers."""
    wanted = sampling(LONG, n=per_worker)
    reading = []
    try:
        for _ in range(2):
            events = client.generate(BASE, "x", sampling=wanted)
            await anext(events)
            reading.append(asyncio.create_task(num_events(events)))  # who does not read is cut off
            await workers_where(client, anywhere(lambda worker: worker.running_requests == RUNNING))
        await workers_where(client, lambda all_: all(each.running_requests == RUNNING for each in all_.values()))
        yield
        assert not any(task.done() for task in reading)
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


async def test_full_queues_are_told_with_a_time_to_come_back_at_both_fronts(fleet: Fleet):
    async with fleet.client() as client:
        async with fully_used(client, PLACES):
            with pytest.raises(QueueFull) as refused:
                await ask(client)
            assert refused.value.retry_after_s is not None
            assert refused.value.retry_after_s > 0
            async with fleet.stream(max_tokens=4) as stream:
                assert stream.response.status_code == 429
                assert int(stream.response.headers["retry-after"]) >= 1
                assert json.loads(await stream.response.aread())["error"]["code"] == "queue_full"
        await until_idle(client, FREED_S)
        assert await is_answered(client)


@pytest.mark.parametrize("front", ["grpc", "http"])
async def test_a_client_that_leaves_frees_everything_wherever_its_request_is(fleet: Fleet, long_adapter, front: str):
    async with fleet.client() as client:
        async with Leaver(fleet, client, front).asking(prompt_tokens=16_000) as leaver:
            await workers_where(client, anywhere(lambda worker: worker.free_blocks < worker.total_blocks))
            assert leaver.num_events == 0  # it is in its prefill
        await until_idle(client, FREED_S)

        async with Leaver(fleet, client, front).asking(n=4) as leaver:
            await leaver.started.wait()
            await workers_where(client, anywhere(lambda worker: worker.running_requests == 4))
        await until_idle(client, FREED_S)

        async with fully_used(client, RUNNING):
            async with Leaver(fleet, client, front).asking() as leaver:
                await workers_where(client, anywhere(lambda worker: worker.waiting_requests == 1))
                assert leaver.num_events == 0  # it is in the queue
            await workers_where(client, lambda all_: not any(w.waiting_requests for w in all_.values()), FREED_S)
        await until_idle(client, FREED_S)

        name = f"never-fetched-{front}"
        digest = (await client.add_adapter(name, long_adapter(31 if front == "grpc" else 32))).adapter.current
        await caught_up(client)
        fleet.registry.send(signal.SIGSTOP)

        def is_fetching(worker: Worker) -> bool:
            return any(each.artifact_digest == digest.artifact_digest and each.loading for each in worker.adapters)

        async with Leaver(fleet, client, front).asking(name):
            await workers_where(client, anywhere(is_fetching))
        workers = await until_idle(client, FREED_S)
        fleet.registry.send(signal.SIGCONT)
        held = {each.artifact_digest for worker in workers.values() for each in worker.adapters}
        assert digest.artifact_digest not in held


async def slow_grpc_reader(fleet: Fleet, stack: AsyncExitStack) -> AsyncIterator[inference_pb2.GenerateResponse]:
    """Open a stream with a small window and read one message of it."""
    windows = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
    channel = await stack.enter_async_context(aio.insecure_channel(fleet.routers[0].address, options=windows))
    request = wire.generate_request(BASE, "x", None, None, sampling(LONG, n=3, logprobs=20))
    call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=120)
    events = aiter(call)
    await anext(events)
    return events


async def slow_http_reader(fleet: Fleet, stack: AsyncExitStack) -> asyncio.StreamReader:
    """Post over a connection with small buffers; what the reader's own buffer takes is all that is read."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", fleet.routers[0].ports["http-port"]))
    reader, writer = await asyncio.open_connection(sock=raw, limit=2**16)
    stack.push_async_callback(writer.wait_closed)
    stack.callback(writer.close)
    body = {"model": BASE, "prompt": "x", "stream": True, "temperature": 0, "logprobs": 20}
    data = json.dumps({**body, "max_tokens": LONG, "n": 3, "ignore_eos": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: "
    writer.write(f"{head}{len(data)}\r\n\r\n".encode() + data)
    await writer.drain()
    assert b"200 OK" in await reader.readline()
    return reader


async def what_was_stuck(events: AsyncIterator[inference_pb2.GenerateResponse]) -> tuple[LoraplexError, int]:
    """Read a stream that was cut off; returns its error and the tokens that were on their way."""
    num_tokens = 0
    try:
        async for event in events:
            num_tokens += len(event.delta.token_ids)
    except aio.AioRpcError as error:
        return from_rpc_error(error), num_tokens
    raise AssertionError("the stream ended well")


async def test_readers_that_do_not_read_neither_grow_memory_nor_hold_up_others(fleet: Fleet):
    async with fleet.client() as client, AsyncExitStack() as stack:
        await ask(client, max_tokens=200, sampling={"logprobs": 20})  # what warms up is no growth
        processes = [fleet.routers[0], *fleet.workers.values()]
        before = [service.rss_bytes() for service in processes]
        over_grpc = await slow_grpc_reader(fleet, stack)
        over_http = await slow_http_reader(fleet, stack)
        deadline = time.monotonic() + 90
        while not all([is_idle(worker) async for worker in client.list_workers()]):  # until both are cut off
            assert time.monotonic() < deadline
            asked_s = time.monotonic()
            assert await is_answered(client)  # others are served all the while
            assert time.monotonic() - asked_s < STALL_S * 0.75
        grown = [service.rss_bytes() - was for service, was in zip(processes, before, strict=True)]
        assert max(grown) < MAX_GROWTH_BYTES, grown
        error, num_stuck = await what_was_stuck(over_grpc)
        assert num_stuck < MAX_STUCK_TOKENS
        assert isinstance(error, ResourceExhausted)
        assert "cut off" in error.message
        end = b""
        while b"\r\n0\r\n\r\n" not in end:
            piece = await over_http.read(2**20)
            assert piece
            end = end[-4096:] + piece
        assert end.count(b"event: error") == 1
        assert b"resource_exhausted" in end
        assert b"[DONE]" not in end
