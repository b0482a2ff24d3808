"""A Docker engine to test with: the one that runs, else one started here for as long as it is needed.

An engine that runs is used and otherwise left alone; one started here ends with this process, however that ends, and
what it made in the machine's network goes with it (`tools.engine_traces`), unless the process is killed outright.
What is run on it: `tools.engine_images`; whether it runs anything at all: `tools.engine_probe`.
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

from tools.engine_traces import network_left_as_found

_ANSWER_S: Final = 30.0
_START_S: Final = 60.0
_STOP_S: Final = 60.0
_DISK_BYTES: Final = 12 * 10**9
"""The images, their layers while they are built, and room to spare."""


class NoEngine(Exception):
    """Nothing can be tested here; the message says why."""


def why_silent(environment: Mapping[str, str]) -> str | None:
    """Return why no engine can be used, or None where one answers."""
    try:
        done = subprocess.run(
            ["docker", "version", "--format", "{{.Server.Version}}"],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ANSWER_S,
            check=False,
        )
    except FileNotFoundError:
        return "no docker command is installed"
    except subprocess.TimeoutExpired:
        return f"no answer within {_ANSWER_S:.0f} s"
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no reason given"])[-1]


@contextmanager
def running_engine(folder: Path) -> Iterator[dict[str, str]]:
    """Yield the environment that makes `docker` talk to an engine; one started here keeps all it has in `folder`.

    Raises NoEngine where there is none and none can be started.
    """
    environment = dict(os.environ)
    why = why_silent(environment)
    if why is None:
        yield environment
        return
    if absent := [name for name in ("docker", "dockerd", "setpriv") if shutil.which(name) is None]:
        raise NoEngine(f"no Docker engine answers ({why}) and none can be started without {', '.join(absent)}")
    if os.geteuid() != 0:
        raise NoEngine(f"no Docker engine answers ({why}) and only root can start one")
    if (free := shutil.disk_usage(folder).free) < _DISK_BYTES:
        raise NoEngine(f"{folder} has {free / 1e9:.0f} GB free, and the images need up to {_DISK_BYTES / 1e9:.0f}")
    environment["DOCKER_HOST"] = f"unix://{folder}/docker.sock"
    with network_left_as_found(), _started(folder, environment):
        print(f"started a Docker engine of our own in {folder}", flush=True)
        yield environment


@contextmanager
def _started(folder: Path, environment: Mapping[str, str]) -> Iterator[None]:
    log = folder / "dockerd.log"
    # setpriv: the kernel ends the engine when this process dies, even of SIGKILL.
    command = ["setpriv", "--pdeathsig", "TERM", "dockerd", "--host", environment["DOCKER_HOST"]]
    command += ["--pidfile", f"{folder}/docker.pid", "--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec"]
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for this process: it takes the cluster down before the engine
        ) as engine,
    ):
        try:
            until_s = time.monotonic() + _START_S
            while (why := why_silent(environment)) is not None:
                if engine.poll() is not None or time.monotonic() > until_s:
                    last = " ".join(log.read_text(errors="replace").split())[-300:]
                    raise NoEngine(f"dockerd does not start here: {last or why}")
                time.sleep(0.25)  # the engine tells nobody that it has started
            yield
        finally:
            engine.terminate()
            try:
                engine.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                engine.kill()
            for left in (folder / "exec" / "netns").glob("*"):  # mounted there for containers on the host's network
                subprocess.run(["umount", left], capture_output=True, check=False)
