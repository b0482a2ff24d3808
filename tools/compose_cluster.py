"""One compose project, driven through its command line as an operator drives it, and looked at from outside."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from loraplex.client import Client
from loraplex.errors import LoraplexError
from loraplex.records import Worker
from tools.docker_engine import NoEngine

T = TypeVar("T")


class Failed(Exception):
    """The cluster did not do what it should; the message says what."""


def until(what: str, timeout_s: float, look: Callable[[], T | None]) -> T:
    """Return what `look` finds; it asks again and again, because containers tell nobody what becomes of them."""
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        if (found := look()) is not None:
            return found
        time.sleep(0.2)
    raise Failed(f"{what}: not within {timeout_s:.0f} s")


def free_port() -> int:
    """Return a port of the loopback interface that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Cluster:
    """Owns the project's environment: its names, ports and images."""

    def __init__(self, clone: Path, environment: dict[str, str], image: str, base: Path) -> None:
        self.clone = clone
        self.ports = {"grpc": free_port(), "http": free_port()}
        self.environment = environment | {
            "COMPOSE_PROJECT_NAME": "loraplex-test",
            "LORAPLEX_TAG": "test",
            "LORAPLEX_PYTHON_IMAGE": image,
            "LORAPLEX_BUILD_NETWORK": "host",
            "LORAPLEX_BASE_DIR": str(base),
            "LORAPLEX_GRPC_PORT": str(self.ports["grpc"]),
            "LORAPLEX_HTTP_PORT": str(self.ports["http"]),
        }
        if self.run("docker", "compose", "version", check=False).returncode == 0:
            self._compose: Sequence[str] = ("docker", "compose")
        elif shutil.which("docker-compose"):
            self._compose = ("docker-compose",)
            self.environment |= {"DOCKER_BUILDKIT": "0", "COMPOSE_DOCKER_CLI_BUILD": "0"}
        else:
            raise NoEngine("neither docker compose nor docker-compose is installed")

    def run(self, *command: str, check: bool = True, timeout_s: float = 1800) -> subprocess.CompletedProcess[str]:
        """Run a command in the clone; what it says is shown where it fails."""
        done = subprocess.run(
            command,
            cwd=self.clone,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if check and done.returncode != 0:
            raise Failed(
                f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
            )
        return done

    def compose(self, *words: str, check: bool = True) -> str:
        """Run a compose command and return what it printed."""
        return self.run(*self._compose, *words, check=check).stdout

    def start_compose(self, *words: str) -> subprocess.Popen[bytes]:
        """Begin a compose command."""
        return subprocess.Popen(
            [*self._compose, *words],
            cwd=self.clone,
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def containers(self, service: str) -> list[str]:
        """Return the ids of a service's containers, running or not."""
        return (
            self.compose("ps", "--all", "-q", service, check=False).split() or self.compose("ps", "-q", service).split()
        )

    def inspect(self, container: str, template: str) -> str:
        """Return a fact of a container."""
        return self.run("docker", "inspect", "--format", template, container).stdout.strip()

    def python(self, service: str, code: str) -> str:
        """Run code in a service's image."""
        image = f"loraplex/{service}:test"
        return self.run("docker", "run", "--rm", "--entrypoint", "python", image, "-c", code).stdout.strip()

    def workers(self) -> list[Worker]:
        """Return the workers that the router hears from now."""
        try:
            with Client(f"127.0.0.1:{self.ports['grpc']}") as client:
                return [worker for worker in client.list_workers() if worker.state != "unreachable"]
        except LoraplexError:
            return []

    def ask(self) -> str:
        """Send the README's curl request, as printed but for the port, and return the answer's text."""
        readme = (self.clone / "README.md").read_text()
        found = re.search(r"(?ms)^\*\*curl\*\*\n+```sh\n(.*?)^```", readme)
        if found is None:
            raise Failed("README.md has no curl example")
        command = found[1].replace("127.0.0.1:8080", f"127.0.0.1:{self.ports['http']}").replace("curl ", "curl -sS ", 1)
        answer = self.run("bash", "-c", command, timeout_s=120).stdout
        events = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: ")]
        if not events or events[-1] != "[DONE]":
            raise Failed(f"the README's request was answered with {answer!r}")
        deltas = [choice["delta"] for event in events[:-1] for choice in json.loads(event)["choices"]]
        return "".join(delta.get("content") or "" for delta in deltas)
