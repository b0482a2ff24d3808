"""One service process of a local cluster: started, watched through gRPC health, restarted, stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loraplex.calls import CHANNEL_OPTIONS
from loraplex.cli.guard import guarded
from loraplex.cli.log_tail import last_progress, tail
from loraplex.cli.restarts import Ended, History
from loraplex.errors import FailedPrecondition

State = Literal["starting", "ready", "not ready", "restarting", "failed", "stopping", "stopped"]
_KILL_WAIT_S: Final = 5.0
_RECONNECT_S: Final = 0.2
_LOOK_AGAIN_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What to run: `python -m command...` in `cwd`. `address` is where its gRPC health can be asked."""

    name: str
    role: Literal["registry", "worker", "router"]
    command: tuple[str, ...]
    address: str
    log_file: Path
    cwd: Path


@dataclass(frozen=True, slots=True)
class Status:
    """What a person is told of a process."""

    name: str
    state: State
    detail: str
    pid: int | None


class ServiceProcess:
    """Owns one operating-system process after the other for its spec. `ready` is set while it takes requests."""

    def __init__(self, spec: ProcessSpec, listener: Callable[[Status], None]) -> None:
        self.spec = spec
        self.ready = asyncio.Event()
        self._listener = listener
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._ready_since_s: float | None = None
        self._watching: asyncio.Task[None] | None = None
        self._given_up = False

    async def supervise(self) -> None:
        """Run until `stop`. Raises FailedPrecondition, with the end of its log, where starting again would not help."""
        history = History()
        while not self._stopping.is_set():
            ended = await self._run_once()
            if self._stopping.is_set():
                return
            history = history.after(ended)
            delay_s = history.delay_s(ended)
            if delay_s is None:
                self._given_up = True
                self._tell("failed", ended.reason)
                raise FailedPrecondition(self._epitaph(ended))
            last = next(iter(tail(self.spec.log_file, 1)), "")
            self._tell("restarting", f"in {delay_s:g} s; {ended.reason}" + (f"; last said: {last}" if last else ""))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)

    async def stop(self, patience_s: float) -> None:
        """Ask the process to end, wait up to `patience_s`, then kill it with all it started."""
        self._stopping.set()
        process = self._process
        if process is None or self._given_up:
            return
        if process.returncode is None:
            self._tell("stopping", "")
            if self._watching is not None:  # an open stream would hold the server's own stop
                self._watching.cancel()
                await asyncio.wait({self._watching})
            with suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), patience_s)
            except TimeoutError:
                self._tell("stopping", f"still there after {patience_s:g} s; killing it")
            finally:
                self._kill_all()
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _KILL_WAIT_S)
        self._tell("stopped", "")

    def kill(self) -> None:
        """Kill the process and all it started, at once and for good: it is not started again."""
        self._stopping.set()
        self._kill_all()

    def _kill_all(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _run_once(self) -> Ended:
        self._ready_since_s = None
        with self.spec.log_file.open("ab") as log:
            said_before = log.tell()
            self._process = process = await asyncio.create_subprocess_exec(
                *guarded("-m", *self.spec.command),
                cwd=self.spec.cwd,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a terminal's Ctrl-C is ours to pass on, in order
                env={**os.environ, "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"},
            )  # fmt: skip
        if self._stopping.is_set():  # asked while it was being made
            self._kill_all()
        self._tell("starting", "")
        async with asyncio.TaskGroup() as tasks:
            self._watching = tasks.create_task(self._watch_health())
            following = tasks.create_task(self._tell_progress(said_before))
            code = await process.wait()
            following.cancel()
            self._kill_all()  # what it started and left behind, such as an engine whose front end died
            self._watching.cancel()
        self.ready.clear()
        return Ended(code, time.monotonic() - self._ready_since_s if self._ready_since_s is not None else 0.0)

    async def _watch_health(self) -> None:
        async with aio.insecure_channel(self.spec.address, options=CHANNEL_OPTIONS) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while True:
                with suppress(aio.AioRpcError):
                    # Waits for the port to open; ends with the process, whose owner cancels us.
                    async for response in stub.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True):
                        self._on_health(serving=response.status == health_pb2.HealthCheckResponse.SERVING)
                await asyncio.sleep(_RECONNECT_S)  # a process that died is told of by its owner, who cancels us now
                self._on_health(serving=False)

    async def _tell_progress(self, begin: int) -> None:
        """Tell what takes so long while the process starts, where it says so in its log."""
        told = ""
        while not self.ready.is_set():
            progress = last_progress(self.spec.log_file, begin)
            if progress != told and not self._stopping.is_set():
                told = progress
                self._tell("starting", progress)
            await asyncio.sleep(_LOOK_AGAIN_S)  # there is no event for a line in a file

    def _on_health(self, *, serving: bool) -> None:
        if self._stopping.is_set() or serving == self.ready.is_set():
            return
        if serving:
            self.ready.set()
            if self._ready_since_s is None:
                self._ready_since_s = time.monotonic()
            self._tell("ready", "")
        else:
            self.ready.clear()
            last = next(iter(tail(self.spec.log_file, 1)), "")
            self._tell("not ready", f"last said: {last}" if last else "")

    def _tell(self, state: State, detail: str) -> None:
        pid = self._process.pid if self._process is not None and state in ("starting", "ready", "not ready") else None
        self._listener(Status(self.spec.name, state, detail, pid))

    def _epitaph(self, ended: Ended) -> str:
        lines = tail(self.spec.log_file)
        said = "".join(f"\n  {line}" for line in lines) if lines else " it said nothing"
        return f"{self.spec.name} could not start ({ended.reason}); the end of its log {self.spec.log_file}:{said}"
