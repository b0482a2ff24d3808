"""`python -m router` as a process: ports, signals, the drain."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest

from loraplex.client import AsyncClient
from loraplex.errors import Draining
from loraplex.worker.v1 import worker_pb2
from tests.integration.router_fakes import (
    ROOT,
    FakeRegistry,
    FakeWorker,
    adapter_entry,
    base_entry,
    choice_finished,
    delta,
    finished,
    never_answer,
)


class Process:
    """A router process whose log lines are read as they come."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []

    async def said(self, event: str, timeout_s: float = 60.0) -> dict[str, Any]:
        assert self.process.stderr is not None
        async with asyncio.timeout(timeout_s):
            while True:
                for line in self.lines:
                    if line["event"] == event:
                        return line
                text = await self.process.stderr.readline()
                if not text:
                    raise AssertionError(f"the router ended without {event}: {self.lines}")
                self.lines.append(json.loads(text))

    async def ended(self, timeout_s: float = 60.0) -> tuple[int, str]:
        async with asyncio.timeout(timeout_s):
            _, stderr = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, stderr.decode()


@asynccontextmanager
async def router_process(*arguments: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "router",
        "--log-format=json",
        *arguments,
        cwd=ROOT,
        env=os.environ | {"LORAPLEX_ROUTER_DRAIN_TIMEOUT_S": "5"},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield Process(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.fixture
async def registry() -> AsyncIterator[FakeRegistry]:
    fake = await FakeRegistry(base_entry(), adapter_entry("sql")).start()
    yield fake
    await fake.stop()


@pytest.fixture
async def worker() -> AsyncIterator[FakeWorker]:
    fake = await FakeWorker().start()
    yield fake
    await fake.stop()


@pytest.mark.parametrize("flag", ["--port", "--http-port"])
async def test_a_taken_port_is_named_and_ends_with_status_1(flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        free = "--http-port=0" if flag == "--port" else "--port=0"
        async with router_process(f"{flag}={port}", free) as router:
            status, stderr = await router.ended()
    assert status == 1
    told = stderr.splitlines()[-1]
    assert told.startswith("router: cannot listen")
    assert str(port) in told
    assert "Traceback" not in stderr


async def test_bad_flags_end_with_status_2_and_a_line_each() -> None:
    async with router_process("--workers=nonsense", "--request-timeout-s=0", "--registry=dns:x:1") as router:
        status, stderr = await router.ended()
    assert status == 2
    assert [line.split(":")[1].strip() for line in stderr.splitlines()] == [
        "--registry",
        "--workers",
        "--request-timeout-s",
    ]


async def test_sigterm_fails_readiness_refuses_finishes_and_ends(registry: FakeRegistry, worker: FakeWorker) -> None:
    go = asyncio.Event()

    async def slow(
        worker: FakeWorker, request: worker_pb2.GenerateRequest
    ) -> AsyncIterator[worker_pb2.GenerateResponse]:
        yield delta("one")
        await go.wait()
        yield delta(" two")
        yield choice_finished()
        yield finished(worker, request, 1, 2)

    worker.script = slow
    body = {"model": "sql", "prompt": "x", "stream": True}
    arguments = (
        f"--registry={registry.address}",
        f"--workers={worker.address}",
        "--port=0",
        "--http-port=0",
        "--drain-delay-s=4",
    )
    async with router_process(*arguments) as router:
        await router.said("router.ready")
        await router.said("fleet.worker_found")
        port = router.lines[0]["http_port"]
        async with (
            httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
            client.stream("POST", "/v1/completions", json=body) as answer,
        ):
            lines = answer.aiter_lines()
            assert "one" in await anext(lines)
            router.process.send_signal(signal.SIGTERM)
            await router.said("router.draining")
            ready = await client.get("/readyz")
            assert (ready.status_code, ready.text) == (503, "shutting down\n")
            # Within the delay, requests are still taken: load balancers have not heard yet.
            go.set()
            during = await client.post("/v1/completions", json=body | {"stream": False})
            assert during.status_code == 200
            rest = [line async for line in lines if line]
            assert rest[-1] == "data: [DONE]"
        status, _ = await router.ended()
    assert status == 0


async def test_after_the_delay_requests_are_refused_as_draining(registry: FakeRegistry, worker: FakeWorker) -> None:
    worker.script = never_answer
    arguments = (
        f"--registry={registry.address}",
        f"--workers={worker.address}",
        "--port=0",
        "--http-port=0",
        "--drain-delay-s=0",
        "--drain-timeout-s=4",
    )
    async with router_process(*arguments) as router:
        await router.said("router.ready")
        await router.said("fleet.worker_found")
        port = router.lines[0]["http_port"]
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            body = {"model": "sql", "prompt": "x"}
            stuck = asyncio.create_task(client.post("/v1/completions", json=body))
            await worker.until(lambda: worker.in_flight == 1)
            router.process.send_signal(signal.SIGINT)
            await router.said("router.draining")
            await asyncio.sleep(0.1)
            refused = await client.post("/v1/completions", json=body)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "draining"
            await router.said("router.cutting_streams")
            assert (await stuck).status_code == 503  # what is cut off is told so, too
            assert stuck.result().json()["error"]["code"] == "draining"
        status, _ = await router.ended()
        await worker.until(lambda: worker.num_cancelled == 1)
    assert status == 0


async def test_streams_that_outlast_the_drain_end_with_an_error_at_both_fronts(
    registry: FakeRegistry, worker: FakeWorker
) -> None:
    async def endless(
        worker: FakeWorker, request: worker_pb2.GenerateRequest
    ) -> AsyncIterator[worker_pb2.GenerateResponse]:
        yield delta("one")
        await asyncio.Event().wait()

    worker.script = endless
    arguments = (f"--registry={registry.address}", f"--workers={worker.address}", "--port=0", "--http-port=0")
    async with router_process(*arguments, "--drain-delay-s=0", "--drain-timeout-s=0.3") as router:
        await router.said("router.ready")
        await router.said("fleet.worker_found")
        listening = router.lines[0]
        body = {"model": "sql", "prompt": "x", "stream": True}
        async with (
            httpx2.AsyncClient(base_url=f"http://127.0.0.1:{listening['http_port']}", timeout=60) as http,
            http.stream("POST", "/v1/completions", json=body) as answer,
            AsyncClient(f"127.0.0.1:{listening['grpc_port']}") as client,
        ):
            lines = answer.aiter_lines()
            assert "one" in await anext(lines)
            events = client.generate("sql", "x")
            await anext(events)
            router.process.send_signal(signal.SIGTERM)
            with pytest.raises(Draining):
                await anext(events)
            rest = [line async for line in lines if line]
            assert rest[-2] == "event: error"
            assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "draining"
        status, _ = await router.ended()
        await worker.until(lambda: worker.num_cancelled == 2)
    assert status == 0


async def test_a_second_signal_ends_at_once(registry: FakeRegistry) -> None:
    arguments = (f"--registry={registry.address}", "--port=0", "--http-port=0", "--drain-delay-s=30")
    async with router_process(*arguments) as router:
        await router.said("router.ready")
        router.process.send_signal(signal.SIGTERM)
        await router.said("router.draining")
        router.process.send_signal(signal.SIGTERM)
        status, _ = await router.ended(15)
    assert status == 128 + signal.SIGTERM
