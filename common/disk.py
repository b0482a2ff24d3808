"""What both owners of files need of a disk: names that last, and knowing a full disk when they meet one."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def is_full(error: OSError) -> bool:
    """Tell whether `error` means that the disk, or the user's share of it, is full."""
    return error.errno in _FULL


def sync_folder(folder: Path) -> None:
    """Bring the folder's names to the disk, so that a rename survives a crash. Blocks."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
