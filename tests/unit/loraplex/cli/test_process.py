"""ServiceProcess against small real processes that serve gRPC health."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from loraplex.cli import restarts
from loraplex.cli.guard import guarded
from loraplex.cli.ports import claim_ports
from loraplex.cli.process import ProcessSpec, ServiceProcess, Status
from loraplex.errors import FailedPrecondition

HEALTHY = """
import signal, sys, time
from concurrent import futures
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

{before}
servicer = health.HealthServicer()
{prepared}
server = grpc.server(futures.ThreadPoolExecutor(2))
health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
server.add_insecure_port(sys.argv[1])
server.start()
servicer.set("", health_pb2.HealthCheckResponse.SERVING)
signal.sigwait([signal.SIGTERM] if {stops} else [signal.SIGUSR2])
"""
BLOCK = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR2])"
CHILD = """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
"""


class Watched:
    """A ServiceProcess under supervision and all that was told of it."""

    def __init__(self, folder: Path, source: str) -> None:
        (folder / "fake_service.py").write_text(source)
        address = f"127.0.0.1:{claim_ports('127.0.0.1', [('test', '--port', 0)])[0]}"
        self.told: list[Status] = []
        self._changed = asyncio.Condition()
        self.spec = ProcessSpec(
            "worker-0", "worker", ("fake_service", address), address, folder / "worker-0.log", folder
        )
        self.process = ServiceProcess(self.spec, self._listen)

    def _listen(self, status: Status) -> None:
        self.told.append(status)
        asyncio.get_running_loop().create_task(self._notify())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(condition)

    def count(self, state: str) -> int:
        return sum(status.state == state for status in self.told)

    @property
    def pid(self) -> int:
        return next(status.pid for status in reversed(self.told) if status.pid is not None)


def script(*, before: str = BLOCK, prepared: str = "", stops: bool = True) -> str:
    return HEALTHY.format(before=before, prepared=prepared, stops=stops)


async def test_it_starts_becomes_ready_and_stops_when_asked(tmp_path):
    watched = Watched(tmp_path, script())
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watched.process.supervise())
        await watched.until(watched.process.ready.is_set)
        pid = watched.pid
        await watched.process.stop(patience_s=10)
    assert [status.state for status in watched.told] == ["starting", "ready", "stopping", "stopped"]
    assert not psutil.pid_exists(pid)


async def test_what_is_killed_is_started_again_and_the_reason_told(tmp_path):
    watched = Watched(tmp_path, script(before=f"{BLOCK}\nprint('hello from', __file__, flush=True)"))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watched.process.supervise())
        await watched.until(lambda: watched.count("ready") == 1)
        first = watched.pid
        os.kill(first, signal.SIGKILL)
        await watched.until(lambda: watched.count("ready") == 2)
        assert watched.pid != first
        await watched.process.stop(patience_s=10)
    restarting = next(status for status in watched.told if status.state == "restarting")
    assert "in 0.5 s; killed by SIGKILL; last said: hello from" in restarting.detail


async def test_what_cannot_start_is_given_up_with_its_last_words(tmp_path):
    watched = Watched(tmp_path, "import sys; print('--port: no such port', file=sys.stderr); sys.exit(2)")
    with pytest.raises(FailedPrecondition, match="exit code 2") as failed:
        await watched.process.supervise()
    assert failed.value.message.endswith("  --port: no such port")
    assert str(watched.spec.log_file) in failed.value.message


async def test_what_does_not_stop_is_killed_with_all_it_started(tmp_path):
    watched = Watched(tmp_path, script(before=CHILD + BLOCK, stops=False))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watched.process.supervise())
        await watched.until(watched.process.ready.is_set)
        child = psutil.Process(int(watched.spec.log_file.read_text().split()[1]))
        await watched.process.stop(patience_s=0.3)
    assert any("killing it" in status.detail for status in watched.told)
    child.wait(60)
    assert not psutil.pid_exists(watched.pid)


async def test_what_a_dead_process_left_behind_is_killed_before_it_starts_again(tmp_path):
    watched = Watched(tmp_path, script(before=CHILD + BLOCK))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watched.process.supervise())
        await watched.until(watched.process.ready.is_set)
        child = psutil.Process(int(watched.spec.log_file.read_text().split()[1]))
        os.kill(watched.pid, signal.SIGKILL)
        await watched.until(lambda: watched.count("starting") == 2)
        child.wait(60)
        await watched.process.stop(patience_s=10)


async def test_one_that_turns_unhealthy_is_shown_as_not_ready(tmp_path):
    toggles = """
def toggle(*_):
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
signal.signal(signal.SIGUSR1, toggle)
"""
    looks_up = "while True:\n    signal.sigtimedwait([], 0.2)\n("  # a signal that comes just before a wait ends none
    watched = Watched(tmp_path, script(prepared=toggles).replace("signal.sigwait(", looks_up))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watched.process.supervise())
        await watched.until(watched.process.ready.is_set)
        os.kill(watched.pid, signal.SIGUSR1)
        await watched.until(lambda: watched.count("not ready") == 1)
        assert not watched.process.ready.is_set()
        await watched.process.stop(patience_s=0.0)


async def test_stopping_during_the_pause_before_a_restart_does_not_wait_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 600.0)
    monkeypatch.setattr(restarts, "MAX_DELAY_S", 600.0)
    watched = Watched(tmp_path, script())
    async with asyncio.timeout(200), asyncio.TaskGroup() as tasks:
        supervised = tasks.create_task(watched.process.supervise())
        await watched.until(watched.process.ready.is_set)
        os.kill(watched.pid, signal.SIGKILL)
        await watched.until(lambda: watched.count("restarting") == 1)
        await watched.process.stop(patience_s=10)
        await asyncio.wait_for(supervised, 60)
    assert watched.count("starting") == 1


async def test_what_its_owner_kills_is_not_started_again(tmp_path):
    watched = Watched(tmp_path, script())
    async with asyncio.timeout(200), asyncio.TaskGroup() as tasks:
        tasks.create_task(watched.process.supervise())
        await watched.until(watched.process.ready.is_set)
        watched.process.kill()
    assert (watched.count("starting"), watched.count("restarting")) == (1, 0)


def test_a_guarded_process_dies_with_its_parent(tmp_path):
    parent = f"""
import subprocess, sys
sys.path.insert(0, {str(Path(__file__).parents[4])!r})
from loraplex.cli.guard import guarded
child = subprocess.Popen(guarded("-c", "import time; print('up', flush=True); time.sleep(600)"))
print(child.pid, flush=True)
child.wait()
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = {process.stdout.readline().strip(), process.stdout.readline().strip()}
        child = psutil.Process(int((lines - {"up"}).pop()))
        process.kill()
        child.wait(60)


def test_a_guard_whose_parent_is_gone_starts_nothing(tmp_path):
    command = guarded("-c", f"open({str(tmp_path / 'made')!r}, 'w')")
    command[4] = "1" if os.getpid() != 1 else "2"  # not the parent it will find
    assert subprocess.run(command, check=False).returncode == 1
    assert not (tmp_path / "made").exists()


async def test_what_takes_long_at_a_start_is_told(tmp_path):
    waits = """
import json, os
print(json.dumps({"event": "kernels.compiling", "progress": "compiling kernels"}), flush=True)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR2])
while not os.path.exists("go"):
    time.sleep(0.02)
"""
    watched = Watched(tmp_path, script(before=waits))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watched.process.supervise())
        await watched.until(lambda: "compiling kernels" in [status.detail for status in watched.told])
        assert watched.told[-1].state == "starting"
        (tmp_path / "go").touch()
        await watched.until(watched.process.ready.is_set)
        await watched.process.stop(patience_s=10)
    assert [status.state for status in watched.told] == ["starting", "starting", "ready", "stopping", "stopped"]
