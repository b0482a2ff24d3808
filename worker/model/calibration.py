"""Measures how fast a freshly opened model prefills and decodes, on the empty cache, before any request comes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

PHASE_S: Final = 0.8
"""Time one measurement aims for; the first run is made however long it takes."""


def tokens_per_second(run: Callable[[int], None], largest: int, clock: Callable[[], float] = time.monotonic) -> float:
    """Return the speed of `run(n)`, which computes n tokens, at the largest n ≤ `largest` that fits the time.

    n starts small and doubles while the next run is expected to end in time; the best speed seen counts, so that a
    noisy neighbour does not make a worker look slow.
    """
    end = clock() + PHASE_S
    size = min(16, largest)
    best = 0.0
    while True:
        before = clock()
        run(size)
        now = clock()
        took = max(now - before, 1e-9)
        best = max(best, size / took)
        if size == largest and best > size / took:
            return best  # at full size, and no longer getting faster
        larger = min(2 * size, largest)
        if now + took * larger / size > end:
            return best
        size = larger
