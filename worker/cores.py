"""How many cores this process may keep busy: those it may run on, bounded by the CPU time its control groups get.

A container with two cores' worth of time on a machine of 64 may run on all of them. With a thread on each, its share of
a period would be gone in a moment, and all of them would stand still until the next.
"""

from __future__ import annotations

import os
from pathlib import Path


def usable_cores(membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return a number of threads worth running, 1 or more; a part of a core counts as one."""
    quotas = [quota for folder in _groups(membership, root) if (quota := _quota(folder)) is not None]
    return max(1, min([len(os.sched_getaffinity(0)), *(int(-(-quota // 1)) for quota in quotas)]))


def _groups(membership: Path, root: Path) -> list[Path]:
    """Return the folders of the process's control groups and of all above them, as far as they can be seen here."""
    folders = [root, root / "cpu", root / "cpu,cpuacct"]  # what a container sees of its own group
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return folders
    for line in lines:  # "0::/path", or version 1's "4:cpu,cpuacct:/path"
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        group = root / controllers / path.lstrip("/")
        folders += [folder for folder in (group, *group.parents) if folder.is_relative_to(root)]
    return folders


def _quota(folder: Path) -> float | None:
    """Return how many cores' time a group gets; None where nothing bounds it."""
    try:
        if (version2 := folder / "cpu.max").exists():
            quota, period = version2.read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # ValueError: "max"
        return None
