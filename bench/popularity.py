"""Which adapter each request of a load asks for, by kinds of popularity. Draws are made from a seed alone.

`identical`: all the same; `distinct`: all in turn; `uniform`: any; `zipf`: the k-th in proportion to k^-1.5, so that a
few are asked for most of the time (Punica's skew; Chen et al., 2023).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Final

ZIPF_EXPONENT: Final = 1.5


def _zipf(names: Sequence[str], count: int, rng: random.Random) -> list[str]:
    weights = [rank**-ZIPF_EXPONENT for rank in range(1, len(names) + 1)]
    return rng.choices(names, weights, k=count)


KINDS: Final[Mapping[str, Callable[[Sequence[str], int, random.Random], list[str]]]] = {
    "identical": lambda names, count, _: [names[0]] * count,
    "distinct": lambda names, count, _: [names[index % len(names)] for index in range(count)],
    "uniform": lambda names, count, rng: rng.choices(names, k=count),
    "zipf": _zipf,
}


def draw(kind: str, names: Sequence[str], count: int, seed: int) -> tuple[str, ...]:
    """Return the models of `count` requests; the first of `names` are the most popular."""
    return tuple(KINDS[kind](names, count, random.Random(seed)))
