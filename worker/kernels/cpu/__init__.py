"""Kernels for CPUs in Numba: float32 arithmetic on weights in the format they were stored in.

Compiled on first use and cached on disk. The compiler notices a change in the file of the function it is asked for, not
in what that calls, so the cache's folder is named by the digest of all sources here and of those that lay out memory.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import numba
import structlog

log = structlog.get_logger(__name__)


def _cache_folder() -> str:
    """Return a folder for these sources' compiled code that can be written to."""
    here = Path(__file__).parent
    files = [*sorted(here.glob("*.py")), here.parent / "layout.py", here.parent / "tiles.py"]
    sources = hashlib.sha256(b"".join(file.read_bytes() for file in files))
    for parent in (
        os.environ.get("NUMBA_CACHE_DIR"),
        Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "loraplex" / "kernels",
        tempfile.gettempdir(),
    ):
        if parent is None:
            continue
        folder = Path(parent).expanduser() / sources.hexdigest()[:16]
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except (OSError, RuntimeError):  # RuntimeError: nobody's home
            continue
        if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():  # what is in it gets executed
            if not any(folder.iterdir()):
                log.info("kernels.compiling", cache=str(folder), note="once for this machine; takes about a minute")
            return str(folder)
    return tempfile.mkdtemp(prefix="loraplex-kernels-")


numba.config.CACHE_DIR = _cache_folder()
