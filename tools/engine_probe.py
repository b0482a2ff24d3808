"""Whether an engine runs containers at all: one that starts may still have no cgroups, no overlay or no network.

The first probe needs no image from anywhere: its own is this machine's shell.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tools.docker_engine import NoEngine

_NAME: Final = "loraplex-test-probe"
_ANSWER: Final = "a container works"
_AS_SERVICES_RUN: Final = (
    "--network", _NAME, "--publish", "127.0.0.1::8080", "--user", "10001:10001", "--read-only", "--tmpfs", "/tmp",  # noqa: S108
    "--cap-drop", "ALL", "--security-opt", "no-new-privileges:true",
)  # fmt: skip
_AS_BUILDS_RUN: Final = ("--network", "host")
_TIMEOUT_S: Final = 120.0


def probe_containers(environment: Mapping[str, str]) -> None:
    """Run a tiny container as the cluster's services are run, and one as builds are. Raises NoEngine."""
    docker = _Docker(environment)
    try:
        docker("import", "-", _NAME, given=shell_archive())
        docker("network", "create", _NAME)
        for options in (_AS_SERVICES_RUN, _AS_BUILDS_RUN):
            said = docker("run", "--rm", *options, _NAME, "/bin/sh", "-c", f"echo {_ANSWER}")
            if said.strip() != _ANSWER:
                raise NoEngine(f"the engine runs no containers here: one said {said!r}")
    finally:
        docker("network", "rm", _NAME, check=False)
        docker("image", "rm", "--force", _NAME, check=False)


def probe_packages(environment: Mapping[str, str], image: str, *command: str) -> None:
    """Run what fetches packages in `image`, on the network that builds have. Raises NoEngine where it fails."""
    _Docker(environment)("run", "--rm", *_AS_BUILDS_RUN, image, *command)


def shell_archive() -> bytes:
    """Return a tar archive with this machine's shell and the libraries it needs. Raises NoEngine."""
    shell = shutil.which("sh")
    if shell is None or shutil.which("ldd") is None:
        raise NoEngine("sh and ldd are needed to see whether containers run")
    needed = subprocess.run(["ldd", shell], capture_output=True, text=True, check=False).stdout
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", dereference=True) as tar:
        tar.add(Path(shell).resolve(), "bin/sh")
        for library in set(re.findall(r"(/\S+)", needed)):
            tar.add(Path(library).resolve(), library.lstrip("/"))
    return archive.getvalue()


class _Docker:
    """The docker command with an engine's environment."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    def __call__(self, *words: str, given: bytes = b"", check: bool = True) -> str:
        """Return what the command printed. Raises NoEngine with its last words where it fails or hangs."""
        try:
            done = subprocess.run(
                ["docker", *words],
                env=self._environment,
                input=given,
                capture_output=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise NoEngine(f"the engine runs no containers here: docker {words[0]} hangs") from None
        if check and done.returncode != 0:
            said = " ".join(done.stderr.decode(errors="replace").partition("\n\nRun 'docker")[0].split())
            raise NoEngine(f"the engine cannot do what is needed here: docker {' '.join(words[:2])}: {said[-500:]}")
        return done.stdout.decode(errors="replace")
