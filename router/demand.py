"""How much each adapter is asked for, as this router sees it: counts that halve in a fixed time. No clock.

What a router counts is its own share of the traffic; several routers see several shares.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

MAX_KEYS: Final = 5_000
MOST_ASKED: Final = 256
"""Adapters that are looked at, those most asked for: a router has other things to do."""

_NOTHING: Final = 0.01  # a count this small is forgotten

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class AdapterKey:
    """A named adapter; the base model has no name."""

    tenant: str
    name: str


@dataclass(frozen=True, slots=True)
class AdapterDemand:
    """What is asked of one adapter: requests per second, and their mean prompt in tokens.

    `cold_rate` are those per second that had to wait for the adapter, `load_share` the seconds they waited, per second.
    """

    key: AdapterKey
    rate: float
    prompt_tokens: float
    cold_rate: float
    load_share: float


class DecayedSums(Generic[K]):
    """Sums of small vectors by key, each halved every `half_life_s`. Times are seconds of any clock that rises."""

    def __init__(self, half_life_s: float, width: int, max_keys: int = MAX_KEYS) -> None:
        self._half_life_s = half_life_s
        self._width = width
        self._max_keys = max_keys
        self._sums: dict[K, tuple[float, tuple[float, ...]]] = {}  # when they were right, and the sums

    def __len__(self) -> int:
        return len(self._sums)

    def add(self, key: K, values: tuple[float, ...], now_s: float) -> None:
        """Add values to the sums of a key. Of too many keys those with the smallest first sums are forgotten."""
        sums = self._at(key, now_s)
        self._sums[key] = now_s, tuple(a + b for a, b in zip(sums, values, strict=True))
        if len(self._sums) > self._max_keys:
            decayed = sorted(self._sums, key=lambda known: self._at(known, now_s)[0])
            for known in decayed[: self._max_keys // 10 + 1]:
                del self._sums[known]

    def per_second(self, now_s: float, most: int | None = None) -> dict[K, tuple[float, ...]]:
        """Return keys' sums as rates, largest first sums first: what has added x per second for long has rate x.

        `most` is how many keys are wanted. Forgets what is nothing by now.
        """
        half_life_s = self._half_life_s
        firsts = [
            (sums[0] * 0.5 ** (max(0.0, now_s - then_s) / half_life_s), key)
            for key, (then_s, sums) in self._sums.items()
        ]
        for first, key in firsts:
            if first < _NOTHING:
                del self._sums[key]
        largest = heapq.nlargest(len(firsts) if most is None else most, firsts, key=lambda entry: entry[0])
        one = math.log(2) / half_life_s
        return {
            key: tuple(value * one for value in self._at(key, now_s)) for first, key in largest if first >= _NOTHING
        }

    def _at(self, key: K, now_s: float) -> tuple[float, ...]:
        if (known := self._sums.get(key)) is None:
            return (0.0,) * self._width
        then_s, sums = known
        left = 0.5 ** (max(0.0, now_s - then_s) / self._half_life_s)
        return tuple(value * left for value in sums)


class Demand:
    """Counts requests by adapter, and by worker and adapter."""

    def __init__(self, half_life_s: float) -> None:
        self._adapters: DecayedSums[AdapterKey] = DecayedSums(half_life_s, 4)
        self._workers: DecayedSums[tuple[str, AdapterKey]] = DecayedSums(half_life_s, 1)

    def arrived(self, key: AdapterKey, prompt_tokens: int, now_s: float) -> None:
        """Note a request for an adapter's current version."""
        self._adapters.add(key, (1.0, prompt_tokens, 0.0, 0.0), now_s)

    def placed(self, worker_id: str, key: AdapterKey, now_s: float) -> None:
        """Note that a worker has begun to answer."""
        self._workers.add((worker_id, key), (1.0,), now_s)

    def waited(self, key: AdapterKey, load_s: float, now_s: float) -> None:
        """Note that a request has waited for its adapter to come to the device."""
        self._adapters.add(key, (0.0, 0.0, 1.0, load_s), now_s)

    def adapters(self, now_s: float) -> list[AdapterDemand]:
        """Return what is asked of each adapter, most first; of the most asked for only."""
        return [
            AdapterDemand(key, rate, tokens / rate, cold_rate, load_share)
            for key, (rate, tokens, cold_rate, load_share) in self._adapters.per_second(now_s, MOST_ASKED).items()
        ]

    def workers(self, now_s: float) -> dict[str, dict[AdapterKey, float]]:
        """Return the requests per second of each adapter on each worker, the base's included."""
        rates: dict[str, dict[AdapterKey, float]] = {}
        for (worker_id, key), (rate,) in self._workers.per_second(now_s).items():
            rates.setdefault(worker_id, {})[key] = rate
        return rates
