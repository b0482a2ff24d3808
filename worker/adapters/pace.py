"""How long transfers take, by what they took: smoothed, so that a few odd ones hardly count. No clock."""

from __future__ import annotations

from typing import Final

_KEEP: Final = 0.8
"""What each transfer leaves of those before it."""
_REACH: Final = 4.0
"""Sizes are told apart up to so many times the largest of the last transfers; beyond, nothing has been seen."""
_SPREAD: Final = 1e-9
"""Variance of sizes, in squares of their mean, below which they are alike."""


class Pace:
    """Expected seconds of a transfer by its bytes: a part that all take, and one per byte; a guess until the first.

    The line of least squares through recent transfers, kept between the flat one and the one through zero. Where all
    were alike it goes through zero. What is much larger than they were is expected to take no more than `_REACH` says.
    """

    def __init__(self, *, guess_s: float = 0.02, guess_bytes: int = 2**20) -> None:
        """Believe at first that `guess_bytes` take `guess_s`."""
        self._guess = guess_s / guess_bytes
        self._weight = self._bytes = self._seconds = 0.0  # sums over the transfers, the latest with weight 1
        self._squares = self._products = 0.0
        self._largest = 0.0
        self.is_measured = False
        """Whether there was a transfer."""

    def add(self, num_bytes: int, seconds: float) -> None:
        """Count a transfer."""
        size = float(max(1, num_bytes))
        self._weight = self._weight * _KEEP + 1
        self._bytes = self._bytes * _KEEP + size
        self._seconds = self._seconds * _KEEP + seconds
        self._squares = self._squares * _KEEP + size * size
        self._products = self._products * _KEEP + size * seconds
        self._largest = max(self._largest * _KEEP, size)
        self.is_measured = True

    def expected_s(self, num_bytes: int) -> float:
        """Return what a transfer of so many bytes is likely to take."""
        if not self.is_measured:
            return num_bytes * self._guess
        mean_bytes, mean_s = self._bytes / self._weight, self._seconds / self._weight
        per_byte = through_zero = mean_s / mean_bytes
        variance = self._squares / self._weight - mean_bytes**2
        if variance > _SPREAD * mean_bytes**2:
            slope = (self._products / self._weight - mean_bytes * mean_s) / variance
            per_byte = min(max(0.0, slope), through_zero)
        return max(0.0, mean_s + per_byte * (min(num_bytes, _REACH * self._largest) - mean_bytes))
