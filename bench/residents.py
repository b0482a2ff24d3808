"""What a step costs with many resident adapters: 1 000 of rank 8 in INT8 against 32, the same traffic, batches of 32.

Engines share the machine: one that has never had an adapter, one with 32 resident, one with 1 000, all distinct and in
the arena. They take turns, so that whatever else the machine does meets all. Each turn draws a batch's adapters:
`uniform` any, each request by itself (so 32 resident ones give some 20 distinct adapters a batch, 1 000 some 31),
`distinct` one per request, which leaves only what residency itself costs, `unused` none, which leaves what adapters
cost those who ask for the base. Times are whole engine steps, frames for the front end included.

Run: python -m bench.residents [--base DIR] [--residents 1000] [--batch 32] [--turns 6] [--no-record]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from bench.in_process import InProcessEngine
from bench.record import record
from bench.template import AdapterTemplate
from loraplex.cli.base_source import resolve_base
from worker.cores import usable_cores

FEW: Final = 32
STEPS: Final = 8
"""Timed per turn; the first few meet factors that no cache holds."""


def draw(rng: random.Random, traffic: str, residents: int, batch: int) -> Sequence[int | None]:
    """Return a batch's adapters."""
    if traffic == "unused":
        return [None] * batch
    if traffic == "distinct":
        return rng.sample(range(residents), batch)
    return [rng.randrange(residents) for _ in range(batch)]


def measure(engines: dict[int, InProcessEngine], traffic: str, batch: int, turns: int) -> list[dict[str, object]]:
    """Return the median step of each engine, which take turns, and the median turn's ratio to the first engine's."""
    rng = random.Random(traffic)
    seconds: dict[int, list[list[float]]] = {residents: [] for residents in engines}
    distinct: dict[int, list[int]] = {residents: [] for residents in engines}
    for turn in range(turns):
        for residents in sorted(engines, reverse=bool(turn % 2)):
            adapters = draw(rng, traffic, residents, batch)
            distinct[residents].append(len(set(adapters) - {None}))
            seconds[residents].append(engines[residents].steps(adapters, STEPS))
    medians = {residents: [statistics.median(steps) for steps in taken] for residents, taken in seconds.items()}
    first = medians[min(engines)]
    return [
        {
            "traffic": traffic,
            "residents": residents,
            "batch": batch,
            "distinct_per_batch": round(statistics.mean(distinct[residents]), 1),
            "step_ms": round(statistics.median(medians[residents]) * 1e3, 2),
            "fastest_ms": round(min(map(min, taken)) * 1e3, 2),
            "slowest_ms": round(max(map(max, taken)) * 1e3, 1),
            "of_first": round(statistics.median(m / f for m, f in zip(medians[residents], first, strict=True)), 3),
        }
        for residents, taken in seconds.items()
    ]


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--base", help="base model folder or hub id; default: the demo base")
    parser.add_argument("--residents", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--turns", type=int, default=6, help="batches drawn per engine and kind of traffic")
    parser.add_argument("--no-record", action="store_true", help="do not write bench/results/")
    args = parser.parse_args()
    if args.residents <= FEW or args.batch > FEW:
        parser.error(f"give a batch of at most {FEW}, and more residents than that")
    torch.set_num_threads(1)
    base = resolve_base(args.base, None, lambda text: print(text, file=sys.stderr)).folder
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-") as scratch:
        template = AdapterTemplate.make(base, rank=args.rank, scratch=Path(scratch))
        engines: dict[int, InProcessEngine] = {}
        for residents in (0, FEW, args.residents):
            started_s = time.monotonic()
            engines[residents] = InProcessEngine.open(
                base,
                template,
                residents=max(residents, 1),
                batch=args.batch,
                dtype=args.dtype,
                threads=args.threads,
                scratch=Path(scratch),
            )
            engines[residents].load(residents)
            print(f"{residents} adapters are resident after {time.monotonic() - started_s:.1f} s", flush=True)
        for traffic in ("unused", "distinct", "uniform"):
            sides = {count: engine for count, engine in engines.items() if count or traffic == "unused"}
            found = measure(sides, traffic, args.batch, args.turns)
            rows += found
            for row in found:
                print(json.dumps(row))
            for row in found[1:]:
                said = f"a step with {row['residents']} resident adapters takes {row['of_first']} of one with"
                print(f"{traffic}: {said} {min(sides) or 'none'}", flush=True)
    record("residents", rows, write=not args.no_record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
