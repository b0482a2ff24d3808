"""Kernels for CPUs in Numba: float32 arithmetic on weights in the format they were stored in.

Compiled on first use and cached on disk (`compiling`). The compiler notices a change in the file of the function it is
asked for, not in what that calls, so the cache's folder is named by the digest of all sources here and of those that
lay out memory.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numba

from worker.kernels.cpu.cache import choose_folder


def _sources_digest() -> str:
    here = Path(__file__).parent
    files = [*sorted(here.glob("*.py")), here.parent / "layout.py", here.parent / "tiles.py"]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


numba.config.CACHE_DIR = str(choose_folder(_sources_digest()[:16]))
