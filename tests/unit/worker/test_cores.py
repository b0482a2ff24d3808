"""Threads follow the CPU time that a container gets, not the cores of its machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from worker.cores import usable_cores


@pytest.fixture(autouse=True)
def _many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))


def cores(folder: Path, membership: str, files: dict[str, str]) -> int:
    for name, text in files.items():
        file = folder / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (folder / "membership").write_text(membership)
    return usable_cores(folder / "membership", folder / "cgroup")


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("200000 100000", 2), ("250000 100000", 3), ("20000 100000", 1), ("max 100000", 64), ("9900000 100000", 64)],
)
def test_a_containers_own_group(tmp_path: Path, quota: str, expected: int) -> None:
    assert cores(tmp_path, "0::/\n", {"cpu.max": f"{quota}\n"}) == expected


def test_the_tightest_of_a_services_groups(tmp_path: Path) -> None:
    files = {"a.slice/cpu.max": "300000 100000", "a.slice/b.service/cpu.max": "max 100000", "cpu.max": "max 100000"}
    assert cores(tmp_path, "0::/a.slice/b.service\n", files) == 3


def test_the_first_version_of_control_groups(tmp_path: Path) -> None:
    group = "cpu,cpuacct/docker/abc"
    files = {f"{group}/cpu.cfs_quota_us": "150000\n", f"{group}/cpu.cfs_period_us": "100000\n"}
    assert cores(tmp_path, "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n", files) == 2
    unbounded = {f"{group}/cpu.cfs_quota_us": "-1\n", f"{group}/cpu.cfs_period_us": "100000\n"}
    assert cores(tmp_path, "4:cpu,cpuacct:/docker/abc\n", unbounded) == 64


def test_a_machine_without_control_groups(tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "none", tmp_path / "nowhere") == 64
