"""Load without a pause, and whether the engine ever stood still in it.

Streams ask for the base and every adapter in turn, with sampling; the engine's steps are read from the worker's
metrics. A step of more than ten times the median fails it, and so does a request that fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from bench.cluster import Served
from bench.load import Work, run

MOST_OF_MEDIAN: Final = 10.0
_STEPS: Final = "loraplex_worker_step_seconds"
_SLOWEST: Final = "loraplex_worker_slowest_step_seconds"


@dataclass(frozen=True, slots=True)
class Steps:
    """The engine's steps so far: how many took at most so many seconds, and the slowest."""

    counts: dict[float, int]
    slowest_s: float

    @classmethod
    def parse(cls, text: str) -> Steps:
        """Read a worker's metrics. Raises KeyError where they have no steps."""
        samples = {
            (sample.name, sample.labels.get("le", "")): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        counts = {float(bound): int(value) for (name, bound), value in samples.items() if name == f"{_STEPS}_bucket"}
        return cls(dict(sorted(counts.items())), samples[_SLOWEST, ""])

    def since(self, before: Steps) -> Steps:
        """Return the steps since `before`. If the slowest ever is older, its bucket's bound stands for the slowest."""
        counts = {bound: count - before.counts[bound] for bound, count in self.counts.items()}
        num = max(counts.values())
        least_bound = min((bound for bound, count in counts.items() if count == num), default=0.0)
        return Steps(counts, min(self.slowest_s, least_bound))

    def quantile_s(self, q: float) -> float:
        """Return a quantile, evenly spread within its bucket. Raises ValueError where there was no step."""
        num = max(self.counts.values())
        if not num:
            raise ValueError("the engine has done no step")
        lower, below = 0.0, 0
        for bound, count in self.counts.items():
            if count >= q * num:
                upper = min(bound, self.slowest_s)
                return lower + (upper - lower) * (q * num - below) / (count - below)
            lower, below = bound, count
        raise AssertionError("the last bucket has all steps")


async def soak(served: Served, seconds: float, concurrency: int, seed: int) -> dict[str, object]:
    """Load a cluster for so long and return the figures; `errors` counts failed requests and too slow steps."""
    before = await _steps(served)
    models = (served.base, *served.adapters)
    work = Work(models, concurrency, 10**9, seed=seed, temperature=0.8, top_p=0.95)
    seen = await run(served.url, work, seconds=seconds)
    steps = (await _steps(served)).since(before)
    median_s = steps.quantile_s(0.5)
    too_slow = steps.slowest_s > MOST_OF_MEDIAN * median_s
    row: dict[str, object] = {
        "case": "soak",
        "concurrency": concurrency,
        "minutes": round(seen.wall_s / 60, 1),
        **seen.summary(),
        "steps": max(steps.counts.values()),
        "step_p50_ms": round(median_s * 1e3, 1),
        "step_p99_ms": round(steps.quantile_s(0.99) * 1e3, 1),
        "step_slowest_ms": round(steps.slowest_s * 1e3, 1),
        "slowest_of_median": round(steps.slowest_s / median_s, 2),
    }
    for error in seen.errors[:3]:
        print(error)
    print(
        f"{row['steps']} steps in {row['minutes']} minutes: p50 {row['step_p50_ms']} ms, p99 {row['step_p99_ms']} ms, "
        f"slowest {row['step_slowest_ms']} ms, {row['slowest_of_median']} x the median"
        f"{f': more than {MOST_OF_MEDIAN:g} x' if too_slow else ''}"
    )
    row["errors"] = len(seen.errors) + too_slow
    return row


async def _steps(served: Served) -> Steps:
    timeout = aiohttp.ClientTimeout(total=30)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.get(f"{served.worker_admin}/metrics") as answer,
    ):
        answer.raise_for_status()
        return Steps.parse(await answer.text())
