"""A registry, two workers and two routers as plain processes that a test kills, stops, pauses and starts again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import psutil

from loraplex.client import AsyncClient, Event, Sampling, TextDelta
from loraplex.errors import LoraplexError
from loraplex.manifest import read_manifest
from loraplex.records import Worker

TREE = Path(__file__).resolve().parents[2]
BASE = "long"
START_S = 60.0
FOUND_S = 2.5
"""A peer that is back must be found within about two seconds."""

Line = dict[str, Any]


class Service:
    """One service: the same command line and ports in each of its lives."""

    def __init__(self, name: str, command: list[str], ready: Callable[[Line], bool], ports: tuple[str, ...]) -> None:
        self.name, self._command, self._ready, self._port_names = name, command, ready, ports
        self.ports: dict[str, int] = dict.fromkeys(ports, 0)
        self.lines: list[Line] = []
        self._said = threading.Condition()
        self.process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.ports['port']}"

    def start(self) -> None:
        """Start it; it is ready when `wait_ready` returns."""
        flags = [text for name, port in self.ports.items() for text in (f"--{name}", str(port))]
        if self.process is not None:
            self.process.wait(10)
        with self._said:
            self.lines = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", *self._command, "--log-format", "json", *flags],
            cwd=TREE,
            env={**os.environ, "LORAPLEX_WORKER_ADMIN_PORT": "0", "LORAPLEX_REGISTRY_ADMIN_PORT": "0"},
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, args=(self.process, self.lines), daemon=True)
        self._reader.start()

    def _read(self, process: subprocess.Popen[str], lines: list[Line]) -> None:
        assert process.stderr is not None
        with process.stderr:
            for text in process.stderr:
                with suppress(json.JSONDecodeError), self._said:
                    lines.append(json.loads(text) if text.startswith("{") else {"event": text})
                    self._said.notify_all()

    def said(self, wanted: Callable[[Line], bool], timeout_s: float = START_S) -> Line:
        """Return the first log line of this life that is wanted."""
        deadline = time.monotonic() + timeout_s
        with self._said:
            while True:
                for line in self.lines:
                    if wanted(line):
                        return line
                left = deadline - time.monotonic()
                assert left > 0, f"{self.name} did not say so: {self.lines[-20:]}"
                self._said.wait(left)

    async def hears(self, event: str, timeout_s: float = START_S) -> Line:
        """Wait for a log event without holding up the event loop."""
        return await asyncio.to_thread(self.said, lambda line: line["event"] == event, timeout_s)

    def wait_ready(self) -> None:
        """Wait until it takes requests, and keep its ports."""
        said = self.said(lambda line: line["event"] == f"{self.name.partition('-')[0]}.listening")
        self.ports = {name: said.get(name.replace("port", "grpc_port", 1), said.get("port")) for name in self.ports}
        if "http-port" in self.ports:
            self.ports["http-port"] = said["http_port"]
        self.said(self._ready)

    def restart(self) -> None:
        """Start it again on its ports and wait until it is ready."""
        self.start()
        self.wait_ready()

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill it and wait for its end."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    async def ended(self, timeout_s: float) -> int:
        """Wait for its end; returns the exit status."""
        assert self.process is not None
        return await asyncio.to_thread(self.process.wait, timeout_s)

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def engine(self) -> psutil.Process:
        """The engine process of a worker."""
        (engine,) = psutil.Process(self.pid).children()
        return engine

    def rss_bytes(self) -> int:
        """Resident memory of the process itself."""
        return int(psutil.Process(self.pid).memory_info().rss)


@dataclass
class HttpStream:
    """An SSE answer: who serves it, and its events."""

    response: httpx2.Response
    lines: AsyncIterator[str] = field(init=False)

    def __post_init__(self) -> None:
        self.lines = self.response.aiter_lines()

    @property
    def worker_id(self) -> str:
        return str(self.response.headers["x-loraplex-worker"])

    async def first(self) -> str:
        """Return the first line."""
        return await anext(self.lines)

    async def rest(self) -> list[str]:
        """Return all further lines that say something."""
        return [line async for line in self.lines if line]


class Fleet:
    """The processes, and clients to them."""

    def __init__(self, base: Path, state: Path) -> None:
        self.base = base
        self.registry = Service(
            "registry",
            ["registry", "--state-dir", str(state / "registry"), "--drain-timeout-s", "20"],
            lambda line: line["event"] == "registry.listening",
            ("port",),
        )
        self.state = state
        self.workers: dict[str, Service] = {}
        self.routers: list[Service] = []

    def open(self) -> None:
        """Start everything and register the base."""
        self.registry.restart()
        for name in ("worker-0", "worker-1"):
            self.workers[name] = self.worker(name)
            self.workers[name].start()
        for service in self.workers.values():
            service.wait_ready()
        self.routers = [self.router(f"router-{index}") for index in range(2)]
        for service in self.routers:
            service.start()

    def worker(self, name: str, *flags: str) -> Service:
        """Return a worker that is not started yet."""
        where = ["--base-dir", str(self.base), "--cache-dir", str(self.state / name), "--worker-id", name]
        limits = ["--max-running-requests", "4", "--max-waiting-requests", "2", "--max-prefill-tokens", "32"]
        engine = ["--dtype", "float32", "--device", "cpu", "--threads", "1", "--kv-cache-bytes", str(96 * 2**20)]
        drain = ["--drain-notice-s", "0.5", "--drain-timeout-s", "20", "--engine-silence-s", "2"]
        return Service(
            name,
            ["worker", "--registry", self.registry.address, *where, *limits, *engine, *drain, *flags],
            lambda line: line["event"] == "worker.health" and line["serving"],
            ("port",),
        )

    def router(self, name: str, *flags: str) -> Service:
        """Return a router of all workers that is not started yet."""
        workers = ",".join(worker.address for worker in self.workers.values())
        drain = ["--drain-delay-s", "0.5", "--drain-timeout-s", "20"]
        return Service(
            name,
            ["router", "--registry", self.registry.address, "--workers", workers, *drain, *flags],
            lambda line: line["event"] == "router.ready",
            ("port", "http-port"),
        )

    def client(self, router: int = 0) -> AsyncClient:
        """Return a client of one of the routers."""
        return AsyncClient(self.routers[router].address, self.registry.address)

    def services(self) -> list[Service]:
        """All of them."""
        return [self.registry, *self.workers.values(), *self.routers]

    def close(self) -> None:
        """End everything, in whatever state it is."""
        for service in self.services():
            if service.runs:
                service.send(signal.SIGCONT)
                service.kill()

    async def whole(self) -> None:
        """Bring back what a test took away; wait until all serves and nothing is held."""
        for service in self.services():
            if service.runs:
                service.send(signal.SIGCONT)
        down = [service for service in self.services() if not service.runs]
        for service in down:
            service.start()
        for service in down:
            await asyncio.to_thread(service.wait_ready)
        for router in range(len(self.routers)):
            async with self.client(router) as client:
                await until_idle(client)

    @asynccontextmanager
    async def stream(self, *, router: int = 0, model: str = BASE, **fields: Any) -> AsyncIterator[HttpStream]:
        """Open a completion stream over HTTP; leaving the block closes the connection."""
        body = {"model": model, "prompt": "x", "temperature": 0, "stream": True, "ignore_eos": True, **fields}
        url = f"http://127.0.0.1:{self.routers[router].ports['http-port']}/v1/completions"
        async with httpx2.AsyncClient(timeout=60) as http, http.stream("POST", url, json=body) as response:
            yield HttpStream(response)


def sampling(max_tokens: int, **fields: Any) -> Sampling:
    """Greedy, of exactly so many tokens."""
    return Sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **fields)


async def ask(client: AsyncClient, model: str = BASE, max_tokens: int = 4, **options: Any) -> list[Event]:
    """Return all events of a generation."""
    wanted = sampling(max_tokens, **options.pop("sampling", {}))
    return [event async for event in client.generate(model, "x", sampling=wanted, **options)]


def num_tokens(events: list[Event]) -> int:
    """Count the tokens in a stream's events."""
    return sum(len(event.token_ids) for event in events if isinstance(event, TextDelta))


async def failure(events: AsyncIterator[Event]) -> tuple[LoraplexError, list[Event]]:
    """Read a stream that must fail; returns the error and what came before it."""
    got: list[Event] = []
    try:
        async for event in events:
            got.append(event)
    except LoraplexError as error:
        return error, got
    raise AssertionError(f"the stream ended well after {num_tokens(got)} tokens")


async def workers_where(
    client: AsyncClient, wanted: Callable[[dict[str, Worker]], bool], timeout_s: float = 15.0
) -> dict[str, Worker]:
    """Wait for what a router knows of its workers; it can only be asked."""
    deadline = time.monotonic() + timeout_s
    while True:
        workers = {worker.worker_id: worker async for worker in client.list_workers()}
        if wanted(workers):
            return workers
        assert time.monotonic() < deadline, workers
        await asyncio.sleep(0.02)


def is_idle(worker: Worker) -> bool:
    """True where a worker serves and holds nothing for anyone."""
    counts = worker.running_requests, worker.waiting_requests, worker.queued_prefill_tokens
    held = sum(adapter.in_flight for adapter in worker.adapters)
    loading = any(adapter.loading for adapter in worker.adapters)
    return (
        worker.state == "serving"
        and counts == (0, 0, 0)
        and held == 0
        and not loading
        and worker.free_blocks == worker.total_blocks > 0
    )


async def until_idle(client: AsyncClient, timeout_s: float = 15.0) -> dict[str, Worker]:
    """Wait until both workers serve and have everything back."""
    return await workers_where(
        client, lambda workers: len(workers) == 2 and all(map(is_idle, workers.values())), timeout_s
    )


async def working(client: AsyncClient, requests: int = 1) -> str:
    """Return the worker that computes so many requests."""
    workers = await workers_where(
        client, lambda all_: any(worker.running_requests == requests for worker in all_.values())
    )
    return next(worker.worker_id for worker in workers.values() if worker.running_requests == requests)


@contextmanager
def running_fleet(base: Path, state: Path) -> Iterator[Fleet]:
    """Run a fleet with its base registered; nothing of it is left afterwards."""
    fleet = Fleet(base, state)
    try:
        fleet.open()
        asyncio.run(_register_base(fleet))
        for service in fleet.routers:
            service.wait_ready()
        yield fleet
    finally:
        fleet.close()


async def _register_base(fleet: Fleet) -> None:
    async with AsyncClient(registry=fleet.registry.address) as client:
        await client.add_base(BASE, read_manifest(fleet.base))
