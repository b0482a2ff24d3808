"""Starts one process that must not outlive this cluster's `loraplex up`: guard.py PARENT_PID PROGRAM ARGUMENT...

Runs as a script before anything else of the child: asks the kernel to kill the process when the parent dies, however it
dies, then becomes PROGRAM (the request survives exec). Doing this here rather than in a fork hook keeps the parent free
to have threads. Only Linux can do this; elsewhere a killed `up` leaves its processes behind.
"""

import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def guarded(*arguments: str) -> list[str]:
    """Return the command line of `python ARGUMENT...` bound to this process's life."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), sys.executable, *arguments]


def main(arguments: list[str]) -> None:
    """Become the program, bound to the parent's life."""
    parent_pid = int(arguments[0])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before we asked
        raise SystemExit(1)
    os.execv(arguments[1], arguments[1:])  # noqa: S606 - the point of this file


if __name__ == "__main__":
    main(sys.argv[1:])
