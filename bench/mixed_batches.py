"""What batches of many adapters cost against batches of one, and the `mixed_batch_ratio` that follows.

At each batch size the same requests decode on one adapter, and on an adapter each, in turns. The ratio is the share of
the largest batch at which a mixed step takes as long as one of the largest batch on one adapter: so nobody's tokens
come slower because adapters are mixed. It is told with what a bound would cost in throughput, which decides whether it
is worth having.

Run: python -m bench.mixed_batches [--base DIR] [--batch 8 16 32 64] [--rank 16] [--turns 4] [--no-record]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch

from bench.in_process import InProcessEngine
from bench.record import record
from bench.template import AdapterTemplate
from loraplex.cli.base_source import resolve_base
from worker.cores import usable_cores

STEPS: Final = 6
"""Timed per turn."""
LEAST_RATIO: Final = 0.5


def measure(engine: InProcessEngine, batch: int, turns: int) -> dict[str, object]:
    """Return the median steps of a batch on one adapter and on an adapter per request."""
    one: list[float] = []
    mixed: list[float] = []
    for turn in range(turns):
        sides = [(one, [turn % batch] * batch), (mixed, list(range(batch)))]
        for taken, adapters in sides if turn % 2 == 0 else reversed(sides):
            taken.extend(engine.steps(adapters, STEPS))
    one_s, mixed_s = statistics.median(one), statistics.median(mixed)
    return {
        "batch": batch,
        "one_adapter_ms": round(one_s * 1e3, 2),
        "mixed_ms": round(mixed_s * 1e3, 2),
        "mixed_of_one": round(mixed_s / one_s, 3),
        "one_adapter_tok_s": round(batch / one_s, 1),
        "mixed_tok_s": round(batch / mixed_s, 1),
    }


def equal_step_ratio(mixed_ms: Mapping[int, float], one_adapter_ms: float) -> float:
    """Return the share of the largest batch whose mixed step takes `one_adapter_ms`, 0.5 to 1, to 0.01.

    Between the measured batch sizes steps are taken to grow evenly.
    """
    sizes = sorted(mixed_ms)
    largest = sizes[-1]
    size = float(sizes[0])
    for smaller, larger in itertools.pairwise(sizes):
        low, high = mixed_ms[smaller], mixed_ms[larger]
        if high <= one_adapter_ms:
            size = larger
        elif low < one_adapter_ms:
            size = smaller + (larger - smaller) * (one_adapter_ms - low) / (high - low)
    return round(min(1.0, max(LEAST_RATIO, size / largest)), 2)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--base", help="base model folder or hub id; default: the demo base")
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--no-record", action="store_true", help="do not write bench/results/")
    args = parser.parse_args()
    torch.set_num_threads(1)
    base = resolve_base(args.base, None, lambda text: print(text, file=sys.stderr)).folder
    sizes = sorted(set(args.batch))
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-") as scratch:
        engine = InProcessEngine.open(
            base,
            AdapterTemplate.make(base, rank=args.rank, scratch=Path(scratch)),
            residents=sizes[-1],
            batch=sizes[-1],
            dtype=args.dtype,
            threads=args.threads,
            scratch=Path(scratch),
        )
        engine.load(sizes[-1])
        rows = []
        for batch in sizes:
            rows.append(measure(engine, batch, args.turns))
            print(json.dumps(rows[-1]), flush=True)
    mixed = {batch: float(str(row["mixed_ms"])) for batch, row in zip(sizes, rows, strict=True)}
    ratio = equal_step_ratio(mixed, float(str(rows[-1]["one_adapter_ms"])))
    print(f"a mixed batch of {ratio:.0%} of {sizes[-1]} steps as fast as one of {sizes[-1]} on a single adapter")
    record("mixed_batches", [*rows, {"mixed_batch_ratio": ratio}], write=not args.no_record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
