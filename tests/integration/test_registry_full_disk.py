"""On a disk without a free byte a registry starts, and what makes room there works."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.running_registry import ROOT
from tests.tiny_adapters import write_adapter
from tests.tiny_base import write_tiny_base

_NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]


def _can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    tried = [*_NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(tried, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not _can_mount(), reason="a small file system needs a mount namespace, which is not allowed here")
def test_a_full_disk_keeps_nobody_from_starting_deleting_and_revoking(tmp_path):
    base = write_tiny_base(tmp_path / "base")
    write_adapter(tmp_path / "adapter", base)
    ran = subprocess.run(
        [*_NAMESPACE, sys.executable, "-m", "tests.full_disk_registry", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-5000:]
    assert "registry.disk_full" in ran.stdout + ran.stderr
