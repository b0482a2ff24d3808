"""The images that everything else is built from: pulled where that works, else stand-ins from Debian's packages."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tools.docker_engine import NoEngine
from tools.engine_probe import probe_packages

PYTHON_IMAGE: Final = "python:3.11-slim-bookworm"
POSTGRES_IMAGE: Final = "postgres:16-bookworm"
_STAND_IN: Final = "loraplex-test/python:bookworm"
_POSTGRES_STAND_IN: Final = "loraplex-test/postgres:bookworm"
_PACKAGES: Final = "python3,python3-venv,python3-pip,ca-certificates"
_CERTIFICATES: Final = Path("/etc/ssl/certs/ca-certificates.crt")
_PULL_S: Final = 300.0
_DEBOOTSTRAP_S: Final = 900.0


class BuildFailed(Exception):
    """A build fails although its packages can be had; the message says how."""


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

    Raises NoEngine where neither can be had because Debian's packages are out of reach, BuildFailed where the
    stand-in's build fails for another reason.
    """
    if _has(environment, POSTGRES_IMAGE) or _pull(environment, POSTGRES_IMAGE):
        return POSTGRES_IMAGE
    probe_packages(environment, python_image, "apt-get", "update", "--error-on=any")
    command = ["docker", "build", "--quiet", "--network", "host", "--build-arg", f"PYTHON_IMAGE={python_image}"]
    built = subprocess.run(
        [*command, "--tag", _POSTGRES_STAND_IN, str(recipe)],
        env={**environment, "DOCKER_BUILDKIT": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode != 0:
        raise BuildFailed(f"{POSTGRES_IMAGE} has no stand-in: {built.stderr.strip()[-2000:]}")
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
