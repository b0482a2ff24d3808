"""What the engine's decisions cost per step, without a model: schedule, update and status, in CPU time of the thread.

Run: python -m bench.scheduler. One JSON line per case. The aim is 0.5 ms at 64 running requests.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Final

from worker.engine.config import EngineConfig
from worker.engine.plan import AdapterLoad, SampledTokens, StepResult
from worker.engine.rates import StepRates
from worker.engine.scheduler import Scheduler
from worker.mailbox import AdapterFile, Sampling, Submit

CASES: Final = (
    (0, 1, 0, 0),
    (0, 8, 8, 0),
    (256, 1, 8, 0),
    (256, 8, 8, 0),
    (256, 64, 64, 0),
    (0, 8, 8, 1000),
    (256, 64, 64, 1000),
)
"""Waiting requests, tenants, adapters they use, adapters that are resident besides."""
RUNNING: Final = 64
WARM_UP_STEPS: Final = 100


def measure(waiting: int, tenants: int, adapters: int, residents: int, steps: int) -> dict[str, float]:
    """Return milliseconds per step once the batch is full."""
    config = EngineConfig(
        vocab_size=50_000,
        eos_token_ids=frozenset({0}),
        max_context_tokens=2048,
        block_tokens=16,
        total_blocks=6000 + 4 * residents,
        max_running_requests=RUNNING,
        max_prefill_tokens=512,
        max_resident_adapters=64 + residents,
        chunk_bytes=360 * 1024,
        adapter_chunk_bytes=360 * 1024,
    )
    scheduler = Scheduler(config, StepRates(1000.0, 100.0))
    for number in range(residents):
        file = AdapterFile(f"idle {number}", "", 1_000_000)
        scheduler.submit(Submit(10_000 + number, (1,), Sampling(max_tokens=1), file, "idle", 0.0))
    while scheduler.status().running_requests or scheduler.status().waiting_requests:
        _turn(scheduler, 0.0)
    for number in range(1, RUNNING + waiting + 1):
        used = AdapterFile(f"{number % adapters:064}", "", 1_000_000) if adapters else None
        prompt = tuple((number * 7 + at) % 40_000 + 1 for at in range(64))
        sampling = Sampling(max_tokens=WARM_UP_STEPS + steps + 1)
        scheduler.submit(Submit(number, prompt, sampling, used, f"tenant {number % tenants}", 0.0))
    taken: list[float] = []
    while len(taken) < WARM_UP_STEPS + steps:
        seconds = _turn(scheduler, len(taken) * 0.01)
        if seconds is not None:
            taken.append(seconds)
    measured = sorted(taken[WARM_UP_STEPS:])
    return {"p50_ms": statistics.median(measured) * 1e3, "p99_ms": measured[int(len(measured) * 0.99)] * 1e3}


def _turn(scheduler: Scheduler, now: float) -> float | None:
    """Do a step, whose loads are done at once; returns seconds of the decisions, None where only loads began."""
    started_s = time.thread_time()
    schedule = scheduler.schedule(now)
    scheduled_s = time.thread_time()
    for placement in schedule.placements:
        scheduler.adapter_loaded(placement.slot, AdapterLoad(1_000_000, 3), 0.01, now)
    if schedule.plan is None:
        return None
    sampled = tuple(SampledTokens(s.request_id, (5,)) for s in schedule.plan.sequences if s.sample)
    result = StepResult(schedule.plan.step, sampled)
    ready_s = time.thread_time()
    scheduler.update(schedule.plan, result, 0.01, now)
    scheduler.status()
    scheduler.take_adapter_changes()
    return scheduled_s - started_s + time.thread_time() - ready_s


def main() -> None:
    """Print a line per case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=500)
    steps = parser.parse_args().steps
    for waiting, tenants, adapters, residents in CASES:
        figures = measure(waiting, tenants, adapters, residents, steps)
        case = {"running": RUNNING, "waiting": waiting, "tenants": tenants, "adapters": adapters, "idle": residents}
        print(json.dumps(case | {name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
