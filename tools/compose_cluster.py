"""One compose project, driven through its command line as an operator drives it, and looked at from outside."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TypeVar

from loraplex.client import Client
from loraplex.credentials import Credentials
from loraplex.errors import LoraplexError
from loraplex.records import Worker
from tools.docker_engine import NoEngine

T = TypeVar("T")
PROJECT: Final = "loraplex-test"


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


def compose_command(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the words that begin a compose command here. Raises NoEngine."""
    version = ("docker", "compose", "version")
    if subprocess.run(version, env=environment, capture_output=True, check=False).returncode == 0:
        return ("docker", "compose")
    if shutil.which("docker-compose"):
        return ("docker-compose",)
    raise NoEngine("neither docker compose nor docker-compose is installed")


def plain_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what would tell make, compose, services or clients more than this test does."""
    prefixes = ("LORAPLEX_", "COMPOSE_", "MAKE", "MFLAGS", "PG")
    return {name: value for name, value in environment.items() if not name.startswith(prefixes)}


def read_env_file(path: Path) -> dict[str, str]:
    """Return what an env file of plain NAME=VALUE lines sets."""
    lines = (line.partition("=") for line in path.read_text().splitlines() if not line.startswith("#"))
    return {name: value for name, found, value in lines if found}


class Cluster:
    """Owns the project's environment: its names, ports and images. Its secrets are in the clone's .env."""

    def __init__(self, clone: Path, environment: dict[str, str], image: str, base: Path) -> None:
        self.clone = clone
        self.ports = {"grpc": free_port(), "http": free_port()}
        self.environment = plain_environment(environment) | {
            "COMPOSE_PROJECT_NAME": PROJECT,
            "LORAPLEX_TAG": "test",
            "LORAPLEX_PYTHON_IMAGE": image,
            "LORAPLEX_BUILD_NETWORK": "host",
            "LORAPLEX_BASE_DIR": str(base),
            "LORAPLEX_GRPC_PORT": str(self.ports["grpc"]),
            "LORAPLEX_HTTP_PORT": str(self.ports["http"]),
        }
        self._compose = compose_command(environment)
        if len(self._compose) == 1:
            self.environment |= {"DOCKER_BUILDKIT": "0", "COMPOSE_DOCKER_CLI_BUILD": "0"}

    def run(self, *command: str, check: bool = True, timeout_s: float = 1800) -> subprocess.CompletedProcess[str]:
        """Run a command in the clone; what it says is shown where it fails. Raises Failed, too where it hangs."""
        try:
            done = subprocess.run(
                command,
                cwd=self.clone,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"{' '.join(command)}: not done within {timeout_s:.0f} s") from None
        if check and done.returncode != 0:
            raise Failed(
                f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
            )
        return done

    def compose(self, *words: str, check: bool = True) -> str:
        """Run a compose command and return what it printed."""
        return self.run(*self._compose, *words, check=check).stdout

    def try_compose(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a compose command that may fail."""
        return self.run(*self._compose, *words, check=False)

    @property
    def secrets(self) -> dict[str, str]:
        """What the clone's .env holds."""
        return read_env_file(self.clone / ".env")

    def start_compose(self, *words: str) -> subprocess.Popen[bytes]:
        """Begin a compose command."""
        return subprocess.Popen(
            [*self._compose, *words],
            cwd=self.clone,
            env=self.environment,
            stdin=subprocess.DEVNULL,
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

    def client(self, *, api_key: str | None = None, cluster_token: str | None = None) -> Client:
        """Return a client of the router, on this machine, that has no secrets but these."""
        credentials = Credentials(api_key, cluster_token)
        return Client(f"127.0.0.1:{self.ports['grpc']}", credentials=credentials)

    def workers(self) -> list[Worker]:
        """Return the workers that the router hears from now."""
        try:
            with self.client(cluster_token=self.secrets["LORAPLEX_CLUSTER_TOKEN"]) as client:
                return [worker for worker in client.list_workers() if worker.state != "unreachable"]
        except LoraplexError:
            return []

    def ask(self) -> str:
        """Send the README's request to containers, as printed but for the port, and return the answer's text."""
        command = readme_request((self.clone / "README.md").read_text())
        command = command.replace("127.0.0.1:8080", f"127.0.0.1:{self.ports['http']}").replace("curl ", "curl -sS ", 1)
        answer = self.run("bash", "-euc", command, timeout_s=120).stdout
        events = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: ")]
        if not events or events[-1] != "[DONE]":
            raise Failed(f"the README's request was answered with {answer!r}")
        deltas = [choice["delta"] for event in events[:-1] for choice in json.loads(event)["choices"]]
        return "".join(delta.get("content") or "" for delta in deltas)


def readme_request(readme: str) -> str:
    """Return the commands of the README's chapter on containers that read .env and send a request. Raises Failed."""
    chapter = readme.partition("\n## Containers\n")[2].partition("\n## ")[0]
    found = re.search(r"(?ms)^(set -a; \. \./\.env; set \+a.*?^curl .*?)^```", chapter)
    if found is None:
        raise Failed("README.md has no request to containers")
    return found[1]
