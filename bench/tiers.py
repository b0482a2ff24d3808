"""What it costs that adapters are not on the device, through HTTP, router and worker; prints ratios and one JSON line.

- `crowded`: four times as many adapters as the device has room for, zipf 1.5 and uniform popularity, against a worker
  that has room for all; both get the same requests, in turns;
- `cold`: one stream; a request whose adapter is in the worker's disk cache against one whose adapter is on the device;
- `loads`: steady streams, with and without other adapters being loaded from the disk cache at a steady rate.

Adapters are random, rank 16, INT8. A request that fails makes it exit 1.

Run: python -m bench.tiers [--parts crowded cold loads] [--no-record]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from grpc import aio

from bench.cluster import Served, resolved, serving
from bench.load import Seeds, Seen, Work, count_errors, run, wait
from bench.make_adapters import MODULES, linear_shapes, write_adapter
from bench.popularity import draw
from bench.record import record
from loraplex.cli.base_source import Base, resolve_base
from loraplex.client import AsyncClient
from loraplex.types.v1 import generation_pb2
from loraplex.worker.v1 import worker_pb2, worker_pb2_grpc

PARTS: Final = ("crowded", "cold", "loads")
CROWDING: Final = 4
"""Adapters per place on the device."""
_COLD_PLACES: Final = 2
_STREAMS: Final = 8
_STREAM_TOKENS: Final = 400
Row = dict[str, object]


async def crowded(roomy: Served, small: Served, kind: str, args: argparse.Namespace, seeds: Seeds) -> Row:
    """Send the same requests to a worker with room for a quarter of the adapters and to one with room for all."""
    seen: dict[str, list[Seen]] = {"crowded": [], "roomy": []}
    for turn in range(args.turns):
        seed = seeds.take()
        requests = args.rounds * args.concurrency
        models = draw(kind, roomy.adapters, requests, seed)
        work = Work(models, args.concurrency, requests, seed=seed)
        sides = [("crowded", small), ("roomy", roomy)]
        for name, served in sides if turn % 2 == 0 else reversed(sides):
            seen[name].append(await run(served.url, work))
    ttft = {name: [second for one in runs for second in one.ttft_s] for name, runs in seen.items()}
    ratios = [one.tokens_per_second / two.tokens_per_second for one, two in zip(*seen.values(), strict=True)]
    row: Row = {
        "case": f"crowded, {kind}",
        "concurrency": args.concurrency,
        "adapters": len(roomy.adapters),
        "places": len(roomy.adapters) // CROWDING,
        "tok_s": round(statistics.median(one.tokens_per_second for one in seen["crowded"]), 1),
        "roomy_tok_s": round(statistics.median(one.tokens_per_second for one in seen["roomy"]), 1),
        "throughput_ratio": round(statistics.median(ratios), 3),
        "ttft_p50_ms": _ms(statistics.median(ttft["crowded"])),
        "roomy_ttft_p50_ms": _ms(statistics.median(ttft["roomy"])),
        "ttft_p50_ratio": round(statistics.median(ttft["crowded"]) / statistics.median(ttft["roomy"]), 3),
        "ttft_max_ms": _ms(max(ttft["crowded"])),
        "roomy_ttft_max_ms": _ms(max(ttft["roomy"])),
        "answered": len(ttft["crowded"]),
        "errors": count_errors(f"crowded, {kind}", [one for runs in seen.values() for one in runs]),
    }
    print(
        f"{row['case']}: {row['tok_s']} tok/s, {row['throughput_ratio']:.1%} of that with room for all; TTFT p50 "
        f"{row['ttft_p50_ms']} ms, {row['ttft_p50_ratio']} x; longest {row['ttft_max_ms']} ms "
        f"({row['roomy_ttft_max_ms']} with room for all); {row['errors']} errors",
        flush=True,
    )
    return row


async def cold(served: Served, requests: int, seeds: Seeds) -> Row:
    """Ask for each adapter twice in a row; the first of the two finds it in the disk cache, the other on the device."""
    first: list[float] = []
    second: list[float] = []
    errors = 0
    for index in range(requests):
        model = served.adapters[index % len(served.adapters)]
        for ttfts in (first, second):
            seen = await run(served.url, Work((model,), 1, 1, output_tokens=4, seed=seeds.take()))
            ttfts.extend(seen.ttft_s)
            errors += count_errors("cold", [seen])
    differences = [one - two for one, two in zip(first, second, strict=True)]
    row: Row = {
        "case": "cold",
        "requests": requests,
        "cold_ttft_p50_ms": _ms(statistics.median(first)),
        "warm_ttft_p50_ms": _ms(statistics.median(second)),
        "cold_costs_p50_ms": _ms(statistics.median(differences)),
        "medians_differ_ms": _ms(statistics.median(first) - statistics.median(second)),
        "errors": errors,
    }
    print(
        f"cold: TTFT p50 {row['cold_ttft_p50_ms']} ms from the disk cache, {row['warm_ttft_p50_ms']} ms on the device; "
        f"each costs {row['cold_costs_p50_ms']} ms more",
        flush=True,
    )
    return row


async def loads(served: Served, args: argparse.Namespace, seeds: Seeds) -> Row:
    """Run steady streams, in turns beside a steady rate of loads and without them."""
    steady, others = served.adapters[:_STREAMS], served.adapters[_STREAMS:]
    gaps: dict[bool, list[float]] = {True: [], False: []}
    slowest: dict[bool, list[float]] = {True: [], False: []}
    errors = num_loads = 0
    for turn in range(args.turns):
        for loading in (True, False) if turn % 2 == 0 else (False, True):
            work = Work(steady, _STREAMS, _STREAMS, prompt_words=4, output_tokens=_STREAM_TOKENS, seed=seeds.take())
            ends = asyncio.Event()
            side = asyncio.create_task(load_steadily(served, others, args.load_rate, ends)) if loading else None
            seen = await run(served.url, work)
            ends.set()
            if side is not None:
                num_loads += await side
            errors += count_errors("loads", [seen])
            gaps[loading] += seen.gaps_s
            slowest[loading].append(max(seen.gaps_s))
    p99 = {loading: statistics.quantiles(values, n=100)[98] for loading, values in gaps.items()}
    row: Row = {
        "case": "loads",
        "streams": _STREAMS,
        "loads": num_loads,
        "loads_per_second": args.load_rate,
        "itl_p50_ms": _ms(statistics.median(gaps[True])),
        "quiet_itl_p50_ms": _ms(statistics.median(gaps[False])),
        "itl_p99_ms": _ms(p99[True]),
        "quiet_itl_p99_ms": _ms(p99[False]),
        "itl_p99_ratio": round(p99[True] / p99[False], 3),
        "itl_max_ms": _ms(max(gaps[True])),
        "quiet_itl_max_ms": _ms(max(gaps[False])),
        "itl_max_ratio": round(max(gaps[True]) / max(gaps[False]), 3),
        "itl_max_ratio_of_turns": round(statistics.median(slowest[True]) / statistics.median(slowest[False]), 3),
        "errors": errors,
    }
    print(
        f"loads: {num_loads} beside {_STREAMS} streams; inter-token p99 {row['itl_p99_ms']} ms, {row['itl_p99_ratio']} "
        f"x that without; longest {row['itl_max_ms']} ms, {row['itl_max_ratio']} x",
        flush=True,
    )
    return row


async def load_steadily(served: Served, adapters: Sequence[str], rate: float, ends: asyncio.Event) -> int:
    """Have the worker load each adapter in turn, so many a second, until `ends`; returns how many it has loaded.

    There is no room for all of them, so hardly any is on the device still when its turn comes: one whose last load was
    slow may be, as it is worth more. It is taken off and loaded again.
    """
    count = 0
    async with (
        AsyncClient(served.router, served.registry) as client,
        aio.insecure_channel(served.worker) as channel,
        asyncio.TaskGroup() as group,
    ):
        worker: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
        versions = {entry.name: entry.current async for entry in client.list_adapters()}

        async def load(name: str) -> None:
            adapter = resolved(versions[name])
            request = worker_pb2.LoadAdapterRequest(base_digest=versions[name].base_digest, adapter=adapter)
            while (await worker.LoadAdapter(request, timeout=60)).tier_hit == generation_pb2.ADAPTER_TIER_DEVICE:
                unload = worker_pb2.UnloadAdapterRequest(artifact_digest=adapter.artifact_digest)
                await worker.UnloadAdapter(unload, timeout=60)

        while not ends.is_set():
            group.create_task(load(adapters[count % len(adapters)]))
            count += 1
            await wait(ends, 1 / rate)
    return count


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 1)


async def _measure(args: argparse.Namespace, base: Base, scratch: Path) -> list[Row]:
    shapes = linear_shapes(base.folder, MODULES)
    count = CROWDING * args.places
    folders = [
        write_adapter(scratch / "adapters" / f"a{index}", shapes, rank=args.rank, dtype="bfloat16", seed=index)
        for index in range(count)
    ]
    seeds = Seeds(args.seed)
    rows: list[Row] = []

    async def cluster(stack: AsyncExitStack, name: str, places: int) -> Served:
        options = ("--max-resident-adapters", str(places), *args.worker_option)
        served = await stack.enter_async_context(
            serving(base, folders, scratch / name, dtype=args.dtype, worker_options=options)
        )
        # Ask for every adapter once, so that all are in the disk cache.
        await run(served.url, Work((served.base, *served.adapters), 8, count + 1, output_tokens=8, seed=seeds.take()))
        return served

    async with AsyncExitStack() as stack:
        if "crowded" in args.parts:
            small, roomy = await cluster(stack, "small", args.places), await cluster(stack, "roomy", count)
            rows += [await crowded(roomy, small, kind, args, seeds) for kind in ("zipf", "uniform")]
    async with AsyncExitStack() as stack:
        if "cold" in args.parts:
            rows.append(await cold(await cluster(stack, "cold", _COLD_PLACES), args.cold_requests, seeds))
    async with AsyncExitStack() as stack:
        if "loads" in args.parts:
            rows.append(await loads(await cluster(stack, "loads", _STREAMS + 2), args, seeds))
    return rows


def main() -> int:
    """Run the benchmark; exits 1 when a request failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--base", help="base model folder or hub id; default: the demo base")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--places", type=int, default=8, help="adapters that fit on the crowded device")
    parser.add_argument("--concurrency", type=int, default=16, help="streams of the crowded case")
    parser.add_argument("--rounds", type=int, default=4, help="requests per stream and turn of the crowded case")
    parser.add_argument("--turns", type=int, default=4, help="turns of each side")
    parser.add_argument("--cold-requests", type=int, default=48)
    parser.add_argument("--load-rate", type=float, default=4.0, help="loads a second beside the steady streams")
    parser.add_argument("--worker-option", action="append", default=[], help="what every worker is told besides")
    parser.add_argument("--seed", type=int, default=1, help="prompts are made from it; use a fresh one per run")
    parser.add_argument("--no-record", action="store_true", help="do not write bench/results/")
    args = parser.parse_args()
    if not 0 < args.places * CROWDING < 1000:
        parser.error("--places must be from 1 to 249")
    base = resolve_base(args.base, None, lambda text: print(text, file=sys.stderr))
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-") as scratch:
        rows = asyncio.run(_measure(args, base, Path(scratch)))
    record("tiers", rows, write=not args.no_record)
    return 1 if any(row["errors"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
