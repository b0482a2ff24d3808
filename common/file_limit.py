"""How many files a process may have open: connections are files, and shells often allow 1,024 where more are free."""

from __future__ import annotations

import resource
from typing import Final

_ENOUGH: Final = 65_536


def raise_file_limit() -> int:
    """Raise this process's soft limit on open files as far as it may be, 65,536 at most; return the limit it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _ENOUGH
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)
