"""How much of a caller's time may be waited for something: a little is kept to say that it did not come. Pure."""

from __future__ import annotations

from typing import Final

_SHARE: Final = 0.1
"""Of the time left that is kept, at most `_MOST_S`."""
_MOST_S: Final = 0.5


def time_to_wait(left_s: float) -> float:
    """Return how many of the seconds left to the deadline may pass before the caller is told."""
    return left_s - min(_MOST_S, _SHARE * left_s)
