"""A Docker engine to test with: the one that runs, else one started here for as long as it is needed.

Also the images it starts from: pulled where that works, else a stand-in of the same Debian release made by debootstrap.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

PYTHON_IMAGE: Final = "python:3.11-slim-bookworm"
POSTGRES_IMAGE: Final = "postgres:16-bookworm"
_STAND_IN: Final = "loraplex-test/python:bookworm"
_POSTGRES_STAND_IN: Final = "loraplex-test/postgres:bookworm"
_PACKAGES: Final = "python3,python3-venv,python3-pip,ca-certificates"
_CERTIFICATES: Final = Path("/etc/ssl/certs/ca-certificates.crt")
_START_S: Final = 60.0
_STOP_S: Final = 60.0
_PULL_S: Final = 300.0
_DEBOOTSTRAP_S: Final = 900.0


class NoEngine(Exception):
    """Nothing can be tested here; the message says why."""


def _answers(environment: Mapping[str, str]) -> str | None:
    """Return why the engine cannot be used, or None."""
    done = subprocess.run(
        ["docker", "version", "--format", "{{.Server.Version}}"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return None if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


@contextmanager
def running_engine(folder: Path) -> Iterator[dict[str, str]]:
    """Yield the environment that makes `docker` talk to an engine; one started here keeps all it has in `folder`.

    Raises NoEngine where there is none and none can be started.
    """
    if shutil.which("docker") is None:
        raise NoEngine("no docker command is installed")
    environment = dict(os.environ)
    why = _answers(environment)
    if why is None:
        yield environment
        return
    if shutil.which("dockerd") is None:
        raise NoEngine(f"no Docker engine answers ({why}) and no dockerd is installed")
    if os.geteuid() != 0:
        raise NoEngine(f"no Docker engine answers ({why}) and only root can start one")
    environment["DOCKER_HOST"] = f"unix://{folder}/docker.sock"
    log = folder / "dockerd.log"
    command = ["dockerd", "--host", environment["DOCKER_HOST"], "--pidfile", f"{folder}/docker.pid"]
    command += ["--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec"]
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as engine:
        try:
            until_s = time.monotonic() + _START_S
            while (why := _answers(environment)) is not None:
                if engine.poll() is not None or time.monotonic() > until_s:
                    last = log.read_text(errors="replace").strip().splitlines()[-1:]
                    raise NoEngine(f"dockerd does not start here: {last[0] if last else why}")
                time.sleep(0.25)  # the engine tells nobody that it has started
            print(f"started a Docker engine of our own in {folder}", flush=True)
            yield environment
        finally:
            engine.terminate()
            try:
                engine.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                engine.kill()
            for left in (folder / "exec" / "netns").glob("*"):  # mounted there for containers on the host's network
                subprocess.run(["umount", left], capture_output=True, check=False)


def base_image(environment: Mapping[str, str], folder: Path) -> str:
    """Return the image to build from: Python's own, or a stand-in where it cannot be pulled. Raises NoEngine."""
    if _has(environment, PYTHON_IMAGE) or _pull(environment, PYTHON_IMAGE):
        return PYTHON_IMAGE
    if not _has(environment, _STAND_IN):
        print(f"{PYTHON_IMAGE} cannot be pulled; making a stand-in with debootstrap", flush=True)
        _make_stand_in(environment, folder / "root")
    return _STAND_IN


def postgres_image(environment: Mapping[str, str], python_image: str, recipe: Path) -> str:
    """Return the image of PostgreSQL: its own, or a stand-in that the Dockerfile in `recipe` makes of `python_image`.

    Raises NoEngine where neither can be had.
    """
    if _has(environment, POSTGRES_IMAGE) or _pull(environment, POSTGRES_IMAGE):
        return POSTGRES_IMAGE
    command = ["docker", "build", "--quiet", "--network", "host", "--build-arg", f"PYTHON_IMAGE={python_image}"]
    built = subprocess.run(
        [*command, "--tag", _POSTGRES_STAND_IN, str(recipe)],
        env={**environment, "DOCKER_BUILDKIT": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode != 0:
        raise NoEngine(f"{POSTGRES_IMAGE} can neither be pulled nor replaced: {built.stderr.strip()[-500:]}")
    return _POSTGRES_STAND_IN


def _has(environment: Mapping[str, str], image: str) -> bool:
    looked = subprocess.run(["docker", "image", "inspect", image], env=environment, capture_output=True, check=False)
    return looked.returncode == 0


def _pull(environment: Mapping[str, str], image: str) -> bool:
    command = ["docker", "pull", "--quiet", image]
    try:
        subprocess.run(command, env=environment, capture_output=True, timeout=_PULL_S, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return False
    return True


def _make_stand_in(environment: Mapping[str, str], root: Path) -> None:
    if shutil.which("debootstrap") is None or os.geteuid() != 0:
        raise NoEngine(f"{PYTHON_IMAGE} cannot be pulled, and debootstrap, or root to run it, is missing")
    command = ["debootstrap", "--variant=minbase", f"--include={_PACKAGES}", "bookworm", str(root)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=_DEBOOTSTRAP_S, check=False)
    if made.returncode != 0:
        raise NoEngine(f"debootstrap fails here: {made.stdout.strip().splitlines()[-1]}")
    if _CERTIFICATES.is_file():  # a build trusts whom this machine trusts
        shutil.copy(_CERTIFICATES, root / _CERTIFICATES.relative_to("/"))
    with subprocess.Popen(["tar", "-C", root, "-c", "."], stdout=subprocess.PIPE) as tar:
        subprocess.run(
            ["docker", "import", "-", _STAND_IN],
            stdin=tar.stdout,
            env=environment,
            stdout=subprocess.DEVNULL,
            check=True,
        )
    shutil.rmtree(root)
