"""Measure serving end to end: base, one adapter and eight mixed adapters at 1, 8 and 32 concurrent streams.

Starts a private cluster on free ports with random r=16 adapters, drives it with `bench.load`, prints a table of ratios
and appends one JSON line to bench/results/serving.jsonl.

Run: python -m bench.serving [--base DIR] [--dtype auto] [--concurrency 1 8 32] [--runs 1] [--no-record]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.load import Seen, Work, run
from bench.make_adapters import MODULES, linear_shapes, write_adapter
from bench.record import TREE, record
from loraplex.cli.base_source import Base, resolve_base
from loraplex.cli.board import LineBoard
from loraplex.cli.bring_up import bring_up
from loraplex.cli.cluster import ClusterPlan, running
from loraplex.cli.ports import claim_ports
from loraplex.client import AsyncClient

_READY_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Case:
    """A set of models asked in turn."""

    name: str
    models: tuple[str, ...]


async def _measure(args: argparse.Namespace, base: Base, scratch: Path) -> list[dict[str, object]]:
    shapes = linear_shapes(base.folder, MODULES)
    names = [f"a{index}" for index in range(8)]
    folders = [
        write_adapter(scratch / "adapters" / name, shapes, rank=args.rank, dtype="bfloat16", seed=index)
        for index, name in enumerate(names)
    ]
    router, http, registry, worker = claim_ports("127.0.0.1", [("the benchmark", "--port", 0)] * 4)
    plan = ClusterPlan(
        tree=TREE,
        state_dir=scratch / "state",
        base_folder=base.folder,
        dtype=args.dtype,
        host="127.0.0.1",
        router_port=router,
        http_port=http,
        registry_port=registry,
        worker_ports=(worker,),
    )
    board = LineBoard()
    cases = [Case("base", (base.base_id,)), Case("1 adapter", ("a0",)), Case("8 mixed", tuple(names))]
    rows: list[dict[str, object]] = []
    async with running(plan, board.update) as cluster, AsyncClient(plan.router, plan.registry) as client:
        await bring_up(plan, cluster, client, base, folders, board.say, timeout_s=_READY_S)
        await run(plan.http, Work((base.base_id, *names), 8, 9, output_tokens=8, seed=args.seed - 1))  # warm-up
        seed = args.seed * 1_000  # prompts are never asked twice: the prefix cache would answer
        for concurrency in args.concurrency:
            for case in cases:
                rows.append(await _case(plan.http, case, concurrency, args, seed))
                seed += args.runs
                print(_line(rows[-1]), flush=True)
    return rows


async def _case(url: str, case: Case, concurrency: int, args: argparse.Namespace, seed: int) -> dict[str, object]:
    seen: list[Seen] = []
    for repeat in range(args.runs):
        work = Work(case.models, concurrency, args.rounds * concurrency, seed=seed + repeat)
        seen.append(await run(url, work))
    rates = [one.tokens_per_second for one in seen]
    median = min(seen, key=lambda one: abs(one.tokens_per_second - statistics.median(rates)))
    if any(one.errors for one in seen):
        print(f"{case.name}, c={concurrency}: {[e for one in seen for e in one.errors][:3]}", file=sys.stderr)
    summary = median.summary()
    summary["errors"] = sum(len(one.errors) for one in seen)
    return {"case": case.name, "concurrency": concurrency, **summary, "slowest_tok_s": round(min(rates), 1)}


def _line(row: dict[str, object]) -> str:
    return (
        f"{row['case']:<10} c={row['concurrency']:<3} {row['tok_s']:>7} tok/s   TTFT p50 {row['ttft_p50_ms']:>8} ms  "
        f"p99 {row['ttft_p99_ms']:>8} ms   inter-token p50 {row['itl_p50_ms']:>6} ms  p99 {row['itl_p99_ms']:>7} ms   "
        f"{row['errors']} errors"
    )


def _ratios(rows: list[dict[str, object]]) -> list[str]:
    rate = {(row["case"], row["concurrency"]): float(str(row["tok_s"])) for row in rows}
    return [
        f"c={concurrency}: {case} runs at {rate[case, concurrency] / rate['base', concurrency]:.0%} of the base"
        for case, concurrency in rate
        if case != "base"
    ]


def main() -> int:
    """Run the benchmark; exits 1 when a request failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--base", help="base model folder or hub id; default: the demo base")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=2, help="requests per stream")
    parser.add_argument("--runs", type=int, default=1, help="repeats; the median one is reported")
    parser.add_argument("--seed", type=int, default=1, help="prompts are made from it; use a fresh one per run")
    parser.add_argument("--no-record", action="store_true", help="do not write bench/results/")
    args = parser.parse_args()
    base = resolve_base(args.base, None, lambda text: print(text, file=sys.stderr))
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-") as scratch:
        rows = asyncio.run(_measure(args, base, Path(scratch)))
    print(*_ratios(rows), sep="\n")
    record("serving", rows, write=not args.no_record)
    return 1 if any(row["errors"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
