"""How many files a process may have open: connections are files, and shells often allow 1,024 where more are free."""

from __future__ import annotations

import resource
from typing import Final

import structlog

_ENOUGH: Final = 65_536
_OTHER_FILES: Final = 256
"""What a process opens besides its callers' connections: others', its own files, its libraries'."""
_LEAST: Final = 16

log = structlog.get_logger(__name__)


def room_for_connections(wanted: int, option: str) -> int:
    """Return how many of the connections that `option` allows the process has files for.

    Callers come by gRPC and by HTTP: each gets half of the files.
    """
    room = max((raise_file_limit() - _OTHER_FILES) // 2, _LEAST)
    if room < wanted:
        log.warning("files.few", option=option, wanted=wanted, room=room, remedy="raise ulimit -n")
    return min(room, wanted)


def raise_file_limit() -> int:
    """Raise this process's soft limit on open files as far as it may be, 65,536 at most; return the limit it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _ENOUGH
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)
