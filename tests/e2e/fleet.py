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

from loraplex.client import AsyncClient
from loraplex.manifest import read_manifest
from tests.e2e.fleet_calls import BASE, any_base, found_again, until_idle

TREE = Path(__file__).resolve().parents[2]
START_S = 240.0
STALL_S = 8.0
"""How long a client of a worker may leave a message unread."""

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
            self.process.wait(60)
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
        told = {"port": said.get("port") or said.get("grpc_port"), "http-port": said.get("http_port")}
        self.ports = {name: int(told[name] or 0) for name in self.ports}
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
        self.process.wait(60)

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
            ["registry", "--state-dir", str(state / "registry"), "--drain-timeout-s", "60"],
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
        limits = ["--max-running-requests", "4", "--max-waiting-requests", "2", "--max-prefill-tokens", "8"]
        engine = ["--dtype", "float32", "--device", "cpu", "--threads", "1", "--arena-bytes", str(96 * 2**20)]
        drain = ["--drain-notice-s", "0.5", "--drain-timeout-s", "60"]
        patience = ["--engine-silence-s", "5", "--stream-stall-s", str(STALL_S)]
        # What befalls one worker befalls the other: both ways of the engine's loop.
        engine.append("--async-scheduling" if name == "worker-1" else "--no-async-scheduling")
        return Service(
            name,
            ["worker", "--registry", self.registry.address, *where, *limits, *engine, *drain, *patience, *flags],
            lambda line: line["event"] == "worker.health" and line["serving"],
            ("port",),
        )

    def router(self, name: str, *flags: str) -> Service:
        """Return a router of all workers that is not started yet."""
        workers = ",".join(worker.address for worker in self.workers.values())
        drain = ["--drain-delay-s", "0.5", "--drain-timeout-s", "60"]
        return Service(
            name,
            ["router", "--registry", self.registry.address, "--workers", workers, *drain, *flags],
            lambda line: line["event"] == "router.ready",
            ("port", "http-port"),
        )

    def client(self, router: int = 0) -> AsyncClient:
        """Return a client of one of the routers."""
        return AsyncClient(self.routers[router].address, self.registry.address)

    def incoming(self) -> list[Path]:
        """What uploads have brought of their files to the registry."""
        return [path for path in (self.state / "registry" / "incoming").rglob("*") if path.is_file()]

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
                await found_again(lambda: any_base(client), 60)

    @asynccontextmanager
    async def stream(self, *, router: int = 0, model: str = BASE, **fields: Any) -> AsyncIterator[HttpStream]:
        """Open a completion stream over HTTP; leaving the block closes the connection."""
        body = {"model": model, "prompt": "x", "temperature": 0, "stream": True, "ignore_eos": True, **fields}
        url = f"http://127.0.0.1:{self.routers[router].ports['http-port']}/v1/completions"
        async with httpx2.AsyncClient(timeout=60) as http, http.stream("POST", url, json=body) as response:
            yield HttpStream(response)


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
