"""How long to wait before trying again: exponential with jitter, between 0.1 and 1 second."""

from __future__ import annotations

import asyncio
import random
from typing import Final

FIRST_S: Final = 0.1
LONGEST_S: Final = 1.0


class Backoff:
    """Grows with every failure in a row; `reset` after a success."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._failures = 0

    def reset(self) -> None:
        """Start over from the shortest wait."""
        self._failures = 0

    def next_s(self) -> float:
        """Return the next wait in seconds: between half and all of the exponential step."""
        step_s: float = min(FIRST_S * 2**self._failures, LONGEST_S)
        self._failures = min(self._failures + 1, 16)
        return max(FIRST_S, step_s * self._rng.uniform(0.5, 1.0))

    async def sleep(self) -> None:
        """Wait."""
        await asyncio.sleep(self.next_s())
