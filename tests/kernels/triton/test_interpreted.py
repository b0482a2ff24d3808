"""Every kernel against the float32 reference, in the interpreter: one process for each file of `interpreted/`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "interpreted"
ROOT = Path(__file__).parents[3]


@pytest.mark.timeout(620)  # minutes where others have the cores
@pytest.mark.parametrize("file", sorted(HERE.glob("test_*.py")), ids=lambda file: file.stem)
def test_kernels_compute_what_the_reference_does(file: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", str(file)],
        cwd=ROOT,
        env={**environment, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout
