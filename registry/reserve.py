"""A little disk space kept back, so that a full disk does not keep anybody from making room on it.

SQLite needs space to delete: pages go to its log first. A file beside the database holds some; it is lent to what
frees space, or must work whatever the disk (a start, a revocation), and laid by again. PostgreSQL has its own disk.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import sqlalchemy as sa
import structlog

log = structlog.get_logger(__name__)

RESERVE_BYTES: Final = 4 * 2**20
"""Many times what SQLite's log takes for one deletion."""
_LEAST_BYTES: Final = 64 * 2**10


class SpaceReserve:
    """Owns the file. `folder` is the database's, or None where there is nothing to keep. Blocks for microseconds."""

    def __init__(self, folder: Path | None) -> None:
        self._file = None if folder is None else folder / "reserve"
        self._num_borrowers = 0

    @classmethod
    def beside(cls, url: sa.URL) -> SpaceReserve:
        """Return the reserve of a database."""
        is_file = url.get_backend_name() == "sqlite" and url.database
        return cls(Path(url.database or "").absolute().parent if is_file else None)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Give the space back to the disk while the block runs, if the disk has too little else."""
        self._lend()
        self._num_borrowers += 1
        try:
            yield
        finally:
            self._num_borrowers -= 1
            if not self._num_borrowers:
                self.lay_by()

    def lay_by(self) -> None:
        """Make the file, of the full size where the disk has twice that, else of half of what there is."""
        if self._file is None or self._file.exists():
            return
        try:
            size = min(RESERVE_BYTES, self._free_bytes() // 2)
            if size < _LEAST_BYTES:
                log.warning("registry.no_reserve", folder=str(self._file.parent), remedy="free some space on its disk")
                return
            with self._file.open("xb") as file:
                os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            log.warning("registry.no_reserve", folder=str(self._file.parent), error=error.strerror)
            self._file.unlink(missing_ok=True)

    def _lend(self) -> None:
        if self._file is None or not self._file.exists() or self._free_bytes() >= RESERVE_BYTES:
            return
        self._file.unlink(missing_ok=True)
        log.warning("registry.disk_full", folder=str(self._file.parent), what_now="the reserve is used to make room")

    def _free_bytes(self) -> int:
        assert self._file is not None  # noqa: S101 - asked after
        return shutil.disk_usage(self._file.parent).free
