"""Measure serving end to end, through HTTP, router and worker; prints tables of ratios and one JSON line.

- `cases`: the base, one adapter, and 8 and 32 adapters mixed, at 1, 8 and 32 concurrent streams;
- `sampling`: temperature 0.8, top_p 0.95 and a seed per request against greedy;
- `unused`: the base alone, on a worker with all adapters on its device, against one that has never had any.

What is compared takes turns, so that whatever else the machine does meets both sides. Starts private clusters on free
ports with random INT8 adapters of rank 16 and drives them with `bench.load`. A request that fails makes it exit 1.

Run: python -m bench.serving [--parts cases sampling unused] [--adapters 1 8 32] [--concurrency 1 8 32] [--no-record]
     python -m bench.serving --soak MINUTES      (load without a pause; see `bench.soak`)
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from bench.cluster import Served, serving
from bench.load import Seeds, Work, count_errors, run
from bench.make_adapters import MODULES, linear_shapes, write_adapter
from bench.record import record
from bench.soak import soak
from loraplex.cli.base_source import Base, resolve_base

PARTS: Final = ("cases", "sampling", "unused")
Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison: where the work goes and, given a seed, what it is."""

    name: str
    url: str
    work: Callable[[int], Work]


async def measure_cases(served: Served, args: argparse.Namespace, seeds: Seeds) -> list[Row]:
    """Measure every number of adapters at every concurrency."""
    cases = {"base": (served.base,)} | {
        "1 adapter" if count == 1 else f"{count} mixed": served.adapters[:count] for count in args.adapters
    }
    rows = []
    for concurrency in args.concurrency:
        base_rate = 0.0
        for case, models in cases.items():
            requests = args.rounds * concurrency
            seen = [
                await run(served.url, Work(models, concurrency, requests, seed=seeds.take())) for _ in range(args.runs)
            ]
            rates = [one.tokens_per_second for one in seen]
            median = min(seen, key=lambda one: abs(one.tokens_per_second - statistics.median(rates)))
            base_rate = base_rate or median.tokens_per_second
            row: Row = {"case": case, "concurrency": concurrency, **median.summary()}
            row["errors"] = count_errors(f"{case}, c={concurrency}", seen)
            row["slowest_tok_s"] = round(min(rates), 1)
            row["of_base"] = round(median.tokens_per_second / base_rate, 3)
            rows.append(row)
            print(_line(row), flush=True)
    return rows


async def compare(ours: Side, other: Side, pairs: int, seeds: Seeds) -> Row:
    """Let two sides take turns; the ratio is the median of the pairs'."""
    rates: dict[str, list[float]] = {ours.name: [], other.name: []}
    errors = 0
    for pair in range(pairs):
        shared = seeds.take()
        for side in (ours, other) if pair % 2 == 0 else (other, ours):
            # The same prompts for both, but where the second side would find them in the prefix cache.
            seed = shared if ours.url != other.url else seeds.take()
            seen = await run(side.url, side.work(seed))
            errors += count_errors(side.name, [seen])
            rates[side.name].append(seen.tokens_per_second)
    ratios = [one / two for one, two in zip(rates[ours.name], rates[other.name], strict=True)]
    row: Row = {
        "case": ours.name,
        "against": other.name,
        "tok_s": round(statistics.median(rates[ours.name]), 1),
        "against_tok_s": round(statistics.median(rates[other.name]), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "errors": errors,
    }
    print(f"{ours.name}: {row['tok_s']} tok/s, {row['ratio']:.1%} of {other.name} ({row['against_tok_s']})", flush=True)
    return row


async def _measure(args: argparse.Namespace, base: Base, scratch: Path) -> list[Row]:
    shapes = linear_shapes(base.folder, MODULES)
    folders = [
        write_adapter(scratch / "adapters" / f"a{index}", shapes, rank=args.rank, dtype="bfloat16", seed=index)
        for index in range(max(args.adapters))
    ]
    seeds = Seeds(args.seed)
    all_fit = ("--max-resident-adapters", str(len(folders)))
    async with serving(base, folders, scratch / "state", dtype=args.dtype, worker_options=all_fit) as served:
        await _warm_up(served, seeds)
        if args.soak:
            return [await soak(served, 60 * args.soak, max(args.concurrency), seeds.take())]
        rows = await measure_cases(served, args, seeds) if "cases" in args.parts else []
        most = max(args.concurrency)

        def work(temperature: float = 0.0, top_p: float = 1.0) -> Callable[[int], Work]:
            plain = Work((served.base,), most, most, temperature=temperature, top_p=top_p)
            return lambda seed: replace(plain, seed=seed)

        if "sampling" in args.parts:
            greedy = Side("greedy", served.url, work())
            sampled = Side("temperature 0.8, top_p 0.95, seeds", served.url, work(temperature=0.8, top_p=0.95))
            rows.append(await compare(sampled, greedy, args.pairs, seeds))
        if "unused" in args.parts:
            none = ("--max-resident-adapters", "1")
            async with serving(base, [], scratch / "plain", dtype=args.dtype, worker_options=none) as plain:
                await _warm_up(plain, seeds)
                ours = Side("adapters resident and unused", served.url, work())
                rows.append(await compare(ours, Side("no adapters", plain.url, work()), args.pairs, seeds))
    return rows


async def _warm_up(served: Served, seeds: Seeds) -> None:
    """Ask for every model once, so that all adapters are on the device."""
    models = (served.base, *served.adapters)
    await run(served.url, Work(models, 8, len(models), output_tokens=8, seed=seeds.take()))


def _line(row: Row) -> str:
    return (
        f"{row['case']:<10} c={row['concurrency']:<3} {row['tok_s']:>7} tok/s {row['of_base']:>5.0%} of base   "
        f"TTFT p50 {row['ttft_p50_ms']:>8} ms  p99 {row['ttft_p99_ms']:>8} ms   "
        f"inter-token p50 {row['itl_p50_ms']:>6} ms  p99 {row['itl_p99_ms']:>7} ms   {row['errors']} errors"
    )


def main() -> int:
    """Run the benchmark; exits 1 when a request failed, or a step of the soak took too long."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--base", help="base model folder or hub id; default: the demo base")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="this long, and nothing else")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 8, 32], help="how many are mixed")
    parser.add_argument("--rounds", type=int, default=2, help="requests per stream of a case")
    parser.add_argument("--runs", type=int, default=1, help="repeats of each case; the median one is reported")
    parser.add_argument("--pairs", type=int, default=6, help="turns of each side of a comparison, a request per stream")
    parser.add_argument("--seed", type=int, default=1, help="prompts are made from it; use a fresh one per run")
    parser.add_argument("--no-record", action="store_true", help="do not write bench/results/")
    args = parser.parse_args()
    base = resolve_base(args.base, None, lambda text: print(text, file=sys.stderr))
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-") as scratch:
        rows = asyncio.run(_measure(args, base, Path(scratch)))
    record("serving", rows, write=not args.no_record)
    return 1 if any(row["errors"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
