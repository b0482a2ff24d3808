"""How far a fetch has come, and what that says of its end and of its source. Pure: time is an argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PATIENCE_S: Final = 2.0
"""After so long without a byte a download stands still."""


@dataclass(slots=True)
class Progress:
    """A fetch on its way: first it waits for its turn, then for the source, perhaps for room, and for each byte."""

    num_bytes: int = 0
    """What has come."""
    _size_bytes: int | None = None
    _began_s: float | None = None
    """When its turn came, later by what it has waited for room."""
    _moved_s: float = 0.0
    _paused_s: float | None = None
    """Since when it waits for room."""
    _failed: bool = False
    """The source was tried in vain since the last byte."""

    def begin(self, now: float) -> None:
        """Ask the source, from the first byte on."""
        self.num_bytes, self._size_bytes, self._failed = 0, None, False
        self._began_s, self._moved_s, self._paused_s = now, now, None

    def pause(self, size_bytes: int, now: float) -> None:
        """Note the whole size, for which there must be room first."""
        self._size_bytes, self._paused_s = size_bytes, now

    def go_on(self, now: float) -> None:
        """Note that there is room."""
        if self._began_s is not None and self._paused_s is not None:
            self._began_s += now - self._paused_s
        self._moved_s, self._paused_s = now, None

    def got(self, num_bytes: int, now: float) -> None:
        """Count bytes that came."""
        self.num_bytes += num_bytes
        self._moved_s, self._failed = now, False

    def fail(self) -> None:
        """Note that the source was tried in vain."""
        self._failed = True

    def seconds(self, now: float) -> float:
        """Return what the source has taken so far; turns and room that were waited for do not count."""
        if self._began_s is None:
            return 0.0
        return (now if self._paused_s is None else self._paused_s) - self._began_s

    def left_s(self, now: float) -> float | None:
        """Return what the rest takes at the pace so far, None before the first byte."""
        if not self.num_bytes or self._size_bytes is None:
            return None
        return max(0, self._size_bytes - self.num_bytes) * self.seconds(now) / self.num_bytes

    def is_in_vain(self, now: float) -> bool:
        """Tell whether nothing comes from the source, though nothing else is waited for."""
        if self.num_bytes or self._began_s is None or self._paused_s is not None:
            return False
        return self._failed or now - self._moved_s >= PATIENCE_S
