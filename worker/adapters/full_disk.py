"""A cache whose disk is full: for how long nothing more is written to it. Pure: time is an argument."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from common.backoff import Backoff
from loraplex.errors import NoSpace

PAUSE: Final = Backoff(first_s=0.5, longest_s=5.0)


class FullDisk:
    """While the disk is full one fetch now and then finds out whether it still is, so that not every request writes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._times = 0
        self._until_s = 0.0

    def check(self, now: float) -> None:
        """Raise NoSpace as long as it is not worth trying again."""
        if now < self._until_s:
            raise no_space(self._folder, self._until_s - now)

    def met(self, now: float) -> NoSpace:
        """Note that the disk was full, and return the error."""
        self._times += 1
        pause_s = PAUSE.pause_s(self._times)
        self._until_s = now + pause_s
        return no_space(self._folder, pause_s)

    def over(self) -> None:
        """Note that there was room."""
        self._times, self._until_s = 0, 0.0


def no_space(folder: Path, retry_after_s: float) -> NoSpace:
    """Return the error of a cache folder whose disk is full."""
    return NoSpace(
        f"the disk of the adapter cache {folder} is full; free some space or give the cache another folder",
        retry_after_s=max(0.1, retry_after_s),
    )
