"""Debian's packages that an engine and a compose cluster need, and their installation on a machine made for tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tools.docker_engine import NoEngine, why_silent

POLICY: Final = Path("/usr/sbin/policy-rc.d")
"""Asked by the installation scripts of Debian's packages whether they may start a service."""
_UPDATE_S: Final = 300.0
_INSTALL_S: Final = 600.0


def missing_packages() -> list[str]:
    """Return the packages whose commands are not here and will be needed."""
    packages = []
    if why_silent(os.environ) is not None and not (shutil.which("docker") and shutil.which("dockerd")):
        packages.append("docker.io")
    if not (shutil.which("docker-compose") or _has_plugin()):
        packages.append("docker-compose")
    if shutil.which("debootstrap") is None:
        packages.append("debootstrap")
    return packages


def install(packages: list[str], policy: Path = POLICY) -> None:
    """Install packages and start no service. Raises NoEngine where that cannot be done."""
    if not packages:
        return
    words = " ".join(packages)
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise NoEngine(f"{words} not installed, and only root on a Debian system can install them")
    print(f"installing {words}", flush=True)
    with services_stay_down(policy):
        _apt_get("update", timeout_s=_UPDATE_S)  # one source of many may be out of reach; what counts comes next
        why = _apt_get("install", "--yes", "--no-install-recommends", *packages, timeout_s=_INSTALL_S)
    if why is not None:
        raise NoEngine(f"{words} not installed and cannot be: {why}")


@contextmanager
def services_stay_down(policy: Path) -> Iterator[None]:
    """Keep installation scripts from starting services; a machine with a policy of its own keeps that."""
    try:
        with policy.open("x") as file:
            file.write("#!/bin/sh\nexit 101\n")
    except FileExistsError:
        yield
        return
    try:
        policy.chmod(0o755)
        yield
    finally:
        policy.unlink()


def _has_plugin() -> bool:
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0


def _apt_get(*words: str, timeout_s: float) -> str | None:
    """Return None, or apt's last words where it failed."""
    try:
        done = subprocess.run(
            ["apt-get", "-qq", *words],
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"apt-get {words[0]} took longer than {timeout_s:.0f} s"
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no reason given"])[-1]
