"""Runs `loraplex up` as a person would, and the other commands against it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from loraplex.client import Client

TREE = Path(__file__).resolve().parents[2]
START_S = 240.0
"""Patience with a start: the first on a machine compiles the kernels."""
KERNELS = os.environ.get("NUMBA_CACHE_DIR") or str(
    Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "loraplex" / "kernels"
)
"""Where compiled kernels are kept anyway: the one thing of the home's cache that a test's cluster shares."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What a finished command said."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """The result of a command with --json."""
        assert self.code == 0, self.err
        return json.loads(self.out)


def loraplex(*arguments: object, env: dict[str, str] | None = None, stdin: str = "", timeout_s: float = 120.0) -> Ran:
    """Run one command to its end."""
    done = subprocess.run(
        [sys.executable, "-m", "loraplex.cli", *map(str, arguments)],
        cwd=TREE,
        env={**os.environ, **(env or {})},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


class LocalCluster:
    """A running `loraplex up --json`: its events, addresses and processes."""

    def __init__(self, process: subprocess.Popen[str], state_dir: Path) -> None:
        self.process, self.state_dir = process, state_dir
        self.events: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.events.append(json.loads(line))
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def wait(
        self, wanted: Callable[[dict[str, Any]], bool], *, since: int = 0, timeout_s: float = START_S
    ) -> dict[str, Any]:
        """Return the first event after number `since` that is wanted; fails when `up` ends or time is over first."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                for event in self.events[since:]:
                    if wanted(event):
                        return event
                left = deadline - time.monotonic()
                assert self._reader.is_alive(), f"`up` ended: {self.events}"
                assert left > 0, f"not within {timeout_s} s: {self.events}\n{self.logs()}"
                self._changed.wait(min(left, 1.0))

    def state(self, name: str, state: str) -> Callable[[dict[str, Any]], bool]:
        """Return the wish for an event that a process reached a state."""
        return lambda event: event["event"] == "process" and (event["name"], event["state"]) == (name, state)

    @property
    def ready(self) -> dict[str, Any]:
        """The event that told the addresses."""
        return self.wait(lambda event: event["event"] == "ready")

    @property
    def env(self) -> dict[str, str]:
        """What other commands need to find this cluster."""
        return {"LORAPLEX_ROUTER": self.ready["router"], "LORAPLEX_REGISTRY": self.ready["registry"]}

    def run(self, *arguments: object, stdin: str = "") -> Ran:
        """Run another command against this cluster."""
        return loraplex(*arguments, env=self.env, stdin=stdin)

    def pid(self, name: str) -> int:
        """The newest process id of a service."""
        return next(
            int(event["pid"])
            for event in reversed(self.events)
            if event["event"] == "process" and event["name"] == name and event["pid"]
        )

    def wait_serving(self, timeout_s: float = 60.0) -> None:
        """Wait until the router sees the worker serve again; it learns of it on its own time."""
        deadline = time.monotonic() + timeout_s
        with Client(self.ready["router"]) as client:
            while not all(worker.state == "serving" for worker in client.list_workers()):
                assert time.monotonic() < deadline, self.logs()
                time.sleep(0.1)

    def join(self) -> None:
        """Wait until all that `up` printed is in `events`."""
        self._reader.join(60)

    def family(self) -> list[psutil.Process]:
        """All processes that `up` started, and theirs."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def logs(self) -> str:
        """The end of every log, for the message of a failed test."""
        files = sorted((self.state_dir / "logs").glob("*.log"))
        return "\n".join(f"== {file.name}\n{file.read_text()[-2000:]}" for file in files)

    def end(self) -> int:
        """Ask it to stop, if it runs; return its exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(60)
        finally:
            if self.process.poll() is None:
                self.process.kill()
            self._reader.join(60)
            assert self.process.stdout is not None
            self.process.stdout.close()


@contextmanager
def local_cluster(base: Path, *arguments: str) -> Iterator[LocalCluster]:
    """Run a cluster on free ports in a state folder of its own; whatever happens, nothing of it is left."""
    with tempfile.TemporaryDirectory(prefix="loraplex-e2e-") as folder:
        state_dir = Path(folder) / "state"
        ports = [part for name in ("router", "http", "registry", "worker", "admin") for part in (f"--{name}-port", "0")]
        command = [sys.executable, "-m", "loraplex.cli", "up", "--json", "--dtype", "float32", "--base", str(base)]
        process = subprocess.Popen(
            [*command, "--state", str(state_dir), *ports, *arguments],
            cwd=TREE,
            env={**os.environ, "XDG_CACHE_HOME": str(Path(folder) / "cache"), "NUMBA_CACHE_DIR": KERNELS},
            stdout=subprocess.PIPE,
            text=True,
        )
        cluster = LocalCluster(process, state_dir)
        try:
            yield cluster
        finally:
            family = cluster.family() if process.poll() is None else []
            cluster.end()
            for left in psutil.wait_procs(family, timeout=30)[1]:
                with suppress(psutil.NoSuchProcess):
                    left.kill()
