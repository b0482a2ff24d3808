"""What is held is bounded and given back: full queues, readers that do not read, clients that leave anywhere."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from loraplex.client import AsyncClient, Message
from loraplex.errors import QueueFull, ResourceExhausted
from loraplex.records import Worker
from tests.e2e.fleet import BASE, Fleet, ask, failure, num_tokens, sampling, until_idle, workers_where

RUNNING, PLACES = 4, 6
"""Choices that a worker of the fleet computes, and takes, at a time."""
LONG = 8000
MAX_GROWTH_BYTES = 48 * 2**20
FREED_S = 3.0


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
        task = asyncio.create_task(self._read(model, [40] * prompt_tokens, n))
        try:
            yield self
            assert not task.done()
        finally:
            task.cancel()
            await asyncio.wait([task])


def anywhere(wanted: Callable[[Worker], bool]) -> Callable[[Mapping[str, Worker]], bool]:
    """Return the wish that it holds of some worker."""
    return lambda workers: any(map(wanted, workers.values()))


@asynccontextmanager
async def fully_used(client: AsyncClient, per_worker: int):
    """Keep so many choices on each of the two workers."""
    streams = [client.generate(BASE, "x", sampling=sampling(LONG, n=per_worker)) for _ in range(2)]
    for events in streams:
        await anext(events)
        await workers_where(client, anywhere(lambda worker: worker.running_requests == RUNNING))
    await workers_where(client, lambda all_: all(each.running_requests == RUNNING for each in all_.values()))
    try:
        yield
    finally:
        for events in streams:
            await events.aclose()


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
        assert num_tokens(await ask(client)) == 4


@pytest.mark.parametrize("front", ["grpc", "http"])
async def test_a_client_that_leaves_frees_everything_wherever_its_request_is(fleet: Fleet, long_adapter, front: str):
    async with fleet.client() as client:
        async with Leaver(fleet, client, front).asking(prompt_tokens=8000) as leaver:
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
        await client.get_model(name)
        fleet.registry.send(signal.SIGSTOP)

        def is_fetching(worker: Worker) -> bool:
            return any(each.artifact_digest == digest.artifact_digest and each.loading for each in worker.adapters)

        async with Leaver(fleet, client, front).asking(name):
            await workers_where(client, anywhere(is_fetching))
        workers = await until_idle(client, FREED_S)
        fleet.registry.send(signal.SIGCONT)
        held = {each.artifact_digest for worker in workers.values() for each in worker.adapters}
        assert digest.artifact_digest not in held


async def slow_http_reader(fleet: Fleet, stack: AsyncExitStack, body: dict[str, Any]) -> asyncio.StreamReader:
    """Post over a connection with small buffers, of which nothing is read but what the reader's own buffer takes."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", fleet.routers[0].ports["http-port"]))
    reader, writer = await asyncio.open_connection(sock=raw, limit=2**16)
    stack.callback(writer.transport.abort)
    data = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: "
    writer.write(f"{head}{len(data)}\r\n\r\n".encode() + data)
    await writer.drain()
    return reader


async def test_readers_that_do_not_read_neither_grow_memory_nor_hold_up_others(fleet: Fleet):
    async with fleet.client() as client, fleet.client() as slow, AsyncExitStack() as stack:
        for _ in range(20):  # what warms up is no growth
            await ask(client, max_tokens=200, sampling={"logprobs": 20})
        processes = [fleet.routers[0], *fleet.workers.values()]
        before = [service.rss_bytes() for service in processes]
        over_grpc = slow.generate(
            BASE, messages=[Message("user", "x")], sampling=sampling(LONG, n=3, logprobs=20), timeout_s=120
        )
        await anext(over_grpc)
        reader = await slow_http_reader(
            fleet,
            stack,
            {
                "model": BASE,
                "messages": [{"role": "user", "content": "x"}],
                "stream": True,
                "temperature": 0,
                "max_tokens": LONG,
                "n": 3,
                "logprobs": True,
                "top_logprobs": 20,
                "ignore_eos": True,
            },
        )
        await reader.readline()

        async def cut_off(number: int) -> None:
            def told() -> int:
                lines = [line for worker in fleet.workers.values() for line in worker.lines]
                return sum(line.get("reason") == "RESOURCE_EXHAUSTED" for line in lines)

            deadline = time.monotonic() + 90
            while told() < number:
                assert time.monotonic() < deadline
                asked_s = time.monotonic()
                assert num_tokens(await ask(client)) == 4  # others are served all the while
                assert time.monotonic() - asked_s < 2

        await cut_off(2)
        await until_idle(client, FREED_S)  # the workers have everything back, though both clients still hold on
        grown = [service.rss_bytes() - was for service, was in zip(processes, before, strict=True)]
        assert max(grown) < MAX_GROWTH_BYTES, grown
        error, _ = await failure(over_grpc)
        assert isinstance(error, ResourceExhausted)
        assert "cut off" in error.message
        rest = await reader.read(2**20)
        while piece := await reader.read(2**20):
            rest = rest[-4096:] + piece
            if b"\r\n0\r\n\r\n" in rest:
                break
        assert rest.count(b"event: error") == 1
        assert b"resource_exhausted" in rest
        assert b"[DONE]" not in rest
