"""Where results go: one JSON line per run, with what is needed to run it again."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

TREE: Final = Path(__file__).resolve().parent.parent


def record(name: str, rows: Sequence[dict[str, object]], *, device: str | None = None, write: bool = True) -> None:
    """Print a run of `python -m bench.{name}` as a JSON line, and append it to bench/results/{name}.jsonl.

    `device` is what else than the CPUs computed, and the software that matters to it.
    """
    line = json.dumps(
        {
            "command": " ".join([f"python -m bench.{name}", *sys.argv[1:]]),
            "commit": _commit(),
            "machine": _machine() if device is None else f"{_machine()}, {device}",
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "rows": rows,
        }
    )
    print(line)
    if write:
        file = TREE / "bench" / "results" / f"{name}.jsonl"
        file.parent.mkdir(exist_ok=True)
        with file.open("a") as stream:
            stream.write(line + "\n")


def _commit() -> str:
    """Return what the tree's commit is called, with -dirty behind it where the tree differs."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=TREE, capture_output=True, text=True, check=False
    )
    return described.stdout.strip() or "unknown"


def _machine() -> str:
    try:
        models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    except OSError:
        return platform.machine()
    return f"{len(models)} x {models[0].split(':')[1].strip()}" if models else platform.machine()
