"""bench.gpu_check where there is nothing to check."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    hidden = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "bench.gpu_check", *arguments],
        cwd=ROOT,
        env={**hidden, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_without_a_device_it_says_so_and_fails() -> None:
    ran = run()
    assert ran.returncode == 2
    assert "no CUDA device here" in ran.stderr
    assert not ran.stdout


def test_a_dry_run_needs_the_interpreter() -> None:
    ran = run("--dry-run")
    assert ran.returncode == 2
    assert "TRITON_INTERPRET=1" in ran.stderr
