"""Compiles all kernels, or reads what was compiled before, at one time and by one process."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Final

import numba
import structlog
from numba import types

from worker.kernels.cpu.cache import exclusive
from worker.kernels.cpu.copying import CARRY_OUT, IS_SOUND, carry_out, is_sound
from worker.kernels.cpu.program import follow, lead

_PROGRESS: Final = "compiling kernels, once for this machine; takes about a minute"
"""`loraplex up` shows it while the worker starts."""
_STATE: Final = types.Array(types.int64, 1, "C")
_PROGRAM: Final = types.Array(types.int64, 2, "C")
_once = threading.Lock()

log = structlog.get_logger(__name__)


def compile_kernels() -> None:
    """Make all functions that are called from outside, and with them what they call, ready; done once in a process."""
    with _once:
        wanted = ((lead, (_PROGRAM, _STATE)), (follow, (_STATE,)), (carry_out, CARRY_OUT), (is_sound, IS_SOUND))
        if all(function.signatures for function, _ in wanted):
            return
        folder = Path(numba.config.CACHE_DIR)
        with exclusive(folder) as whole:
            if not whole:
                log.info("kernels.compiling", cache=str(folder), progress=_PROGRESS)
            for function, signature in wanted:
                function.compile(signature)
        for function, _ in wanted:
            function.disable_compile()
