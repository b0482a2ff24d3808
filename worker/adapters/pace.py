"""How long transfers take, by what they took: smoothed, so that a few odd ones hardly count. No clock."""

from __future__ import annotations

from typing import Final

_KEEP: Final = 0.8
"""What each transfer leaves of those before it."""


class Pace:
    """Expected seconds of a transfer by its bytes; a guess until the first."""

    def __init__(self, *, guess_s: float = 0.02, guess_bytes: int = 2**20) -> None:
        """Believe at first that `guess_bytes` take `guess_s`."""
        self._seconds, self._bytes = guess_s, float(guess_bytes)
        self.is_measured = False
        """Whether there was a transfer."""

    def add(self, num_bytes: int, seconds: float) -> None:
        """Count a transfer."""
        if not self.is_measured:
            self._seconds = self._bytes = 0.0
            self.is_measured = True
        self._seconds = self._seconds * _KEEP + seconds
        self._bytes = self._bytes * _KEEP + max(1, num_bytes)

    def expected_s(self, num_bytes: int) -> float:
        """Return what a transfer of so many bytes is likely to take."""
        return num_bytes * self._seconds / self._bytes
