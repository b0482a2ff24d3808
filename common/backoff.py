"""How long to wait before trying again. No clock; whoever tries counts the failures, and randomness is an argument."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

_MAX_DOUBLINGS: Final = 30


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses that double from the first to the longest, in seconds."""

    first_s: float
    longest_s: float

    def pause_s(self, failures: int) -> float:
        """Return the pause after so many failures in a row, at least one."""
        return min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, _MAX_DOUBLINGS))

    def jittered_s(self, failures: int, rng: random.Random) -> float:
        """Return the pause shortened by up to half, so that what failed together does not come back together."""
        return max(self.first_s, self.pause_s(failures) * rng.uniform(0.5, 1.0))
