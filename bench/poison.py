"""What adapters that cannot be had cost those who do not ask for them; prints ratios and one JSON line.

Eight steady streams, in turns alone and beside requests for adapters of one fault: an artifact with other bytes than
its digest says, one that is not there, one whose download stalls, and any where the disk is full. Then the fault ends,
and every one of these adapters has to answer, without a restart. The disk is a small tmpfs, which needs root; without
it that case is left out, and said so. Exits 1 where a steady stream fails, a fault is not told, or an adapter does not
recover.

Run: python -m bench.poison [--turns 4] [--rate 4] [--no-record]
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.cluster import Served, serving
from bench.faulty_source import Fault, FaultySource
from bench.load import Seeds, Work, count_errors, run, wait
from bench.make_adapters import MODULES, linear_shapes, write_adapter
from bench.record import record
from common.disk import is_full
from loraplex.cli.base_source import Base, resolve_base
from loraplex.client import AsyncClient, Sampling
from loraplex.errors import LoraplexError

_STREAMS: Final = 8
_STREAM_TOKENS: Final = 300
_POISONED: Final = 4
"""Adapters of each fault."""
_PATIENCE_S: Final = 5.0
"""Deadline of a request for one of them."""
_RECOVERY_S: Final = 120.0
_DISK_BYTES: Final = 192 * 2**20
FULL_DISK: Final = "full disk"
CASES: Final = (FULL_DISK, *[fault.value for fault in Fault])
"""The full disk comes first: later, what the others have left there could make room."""
REASONS: Final = {
    "missing": {"ARTIFACT_NOT_FOUND"},
    "corrupt": {"CORRUPT_ARTIFACT"},
    "stalled": {"ARTIFACT_UNREACHABLE", "DEADLINE_EXCEEDED", "DEADLINE_UNREACHABLE"},
    FULL_DISK: {"NO_SPACE", "answered"},  # between two turns nobody needs what is there
}
"""What callers may be told of each fault."""
Row = dict[str, object]


@dataclass(slots=True)
class Bench:
    """A cluster whose worker fetches through a faulty source."""

    served: Served
    source: FaultySource
    client: AsyncClient
    digests: dict[str, str]
    """Artifacts by adapter name."""
    cache: Path
    seeds: Seeds
    reasons: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def poisoned(self, case: str, adapters: Sequence[str]) -> Iterator[None]:
        """Make adapters impossible to have while the block lasts."""
        if case == FULL_DISK:
            ballast = self.cache / "ballast"
            try:
                fill(ballast)
                yield
            finally:
                ballast.unlink()
            return
        self.source.faults = {self.digests[name]: Fault(case) for name in adapters}
        try:
            yield
        finally:
            self.source.faults = {}

    async def ask_steadily(self, adapters: Sequence[str], rate: float, ends: asyncio.Event) -> None:
        """Ask for one token of each adapter in turn, so many a second, until `ends`; notes what came of it."""
        async with asyncio.TaskGroup() as group:
            count = 0
            while not ends.is_set():
                group.create_task(self.ask(adapters[count % len(adapters)]))
                count += 1
                await wait(ends, 1 / rate)

    async def ask(self, adapter: str) -> bool:
        """Ask for one token; returns whether it came."""
        try:
            stream = self.client.generate(
                adapter, "Hello", sampling=Sampling(max_tokens=1, temperature=0.0), timeout_s=_PATIENCE_S
            )
            async for _ in stream:
                pass
        except LoraplexError as error:
            self.reasons[error.reason] += 1
            return False
        self.reasons["answered"] += 1
        return True

    async def recover(self, adapters: Sequence[str]) -> float:
        """Ask until every adapter has answered; returns the seconds that took. Raises TimeoutError."""
        started_s = time.monotonic()
        missing = list(adapters)
        async with asyncio.timeout(_RECOVERY_S):
            while missing:
                answered = await asyncio.gather(*(self.ask(name) for name in missing))
                missing = [name for name, came in zip(missing, answered, strict=True) if not came]
                await asyncio.sleep(0.2 if missing else 0)
        return time.monotonic() - started_s


async def measure(bench: Bench, case: str, adapters: Sequence[str], turns: int, rate: float) -> Row:
    """Measure one fault."""
    steady = bench.served.adapters[:_STREAMS]
    gaps: dict[bool, list[float]] = {True: [], False: []}
    ttft: dict[bool, list[float]] = {True: [], False: []}
    bench.reasons.clear()
    errors = 0
    with bench.poisoned(case, adapters):
        for turn in range(turns):
            for poisoned in (True, False) if turn % 2 == 0 else (False, True):
                ends = asyncio.Event()
                side = asyncio.create_task(bench.ask_steadily(adapters, rate, ends)) if poisoned else None
                seed = bench.seeds.take()
                work = Work(steady, _STREAMS, _STREAMS, prompt_words=4, output_tokens=_STREAM_TOKENS, seed=seed)
                seen = await run(bench.served.url, work)
                ends.set()
                if side is not None:
                    await side
                errors += count_errors(case, [seen])
                gaps[poisoned] += seen.gaps_s
                ttft[poisoned] += seen.ttft_s
        told = dict(bench.reasons)
    try:
        recovery_s = await bench.recover(adapters)
    except TimeoutError:
        recovery_s = float("inf")
    p99 = {poisoned: statistics.quantiles(values, n=100)[98] for poisoned, values in gaps.items()}
    row: Row = {
        "case": case,
        "streams": _STREAMS,
        "requests_per_second": rate,
        "told": told,
        "itl_p99_ms": round(1e3 * p99[True], 1),
        "quiet_itl_p99_ms": round(1e3 * p99[False], 1),
        "itl_p99_ratio": round(p99[True] / p99[False], 3),
        "itl_max_ms": round(1e3 * max(gaps[True]), 1),
        "quiet_itl_max_ms": round(1e3 * max(gaps[False]), 1),
        "ttft_max_ms": round(1e3 * max(ttft[True]), 1),
        "quiet_ttft_max_ms": round(1e3 * max(ttft[False]), 1),
        "recovery_s": round(recovery_s, 1),
        "errors": errors + (not told.keys() <= REASONS[case]) + (recovery_s == float("inf")),
    }
    print(
        f"{case}: inter-token p99 of others {row['itl_p99_ms']} ms, {row['itl_p99_ratio']} x that without; "
        f"told {told}; all served {row['recovery_s']} s after the fault's end; {row['errors']} errors",
        flush=True,
    )
    return row


def fill(file: Path) -> None:
    """Write a file until its disk is full."""
    with file.open("wb", buffering=0) as stream:
        try:
            while stream.write(bytes(2**16)):
                pass
        except OSError as error:
            if not is_full(error):
                raise


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mount a small disk on `folder` while the block lasts; tells whether that could be done."""
    folder.mkdir()
    mount = shutil.which("mount") or "/bin/mount"
    command = [mount, "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(folder)]
    mounted = Path(mount).exists() and subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run([shutil.which("umount") or "/bin/umount", str(folder)], check=True)


@asynccontextmanager
async def _bench(args: argparse.Namespace, base: Base, scratch: Path, cache: Path) -> AsyncIterator[Bench]:
    shapes = linear_shapes(base.folder, MODULES)
    folders = [
        write_adapter(scratch / "adapters" / f"a{index}", shapes, rank=16, dtype="bfloat16", seed=index)
        for index in range(_STREAMS + _POISONED * len(CASES))
    ]
    async with FaultySource.running() as source:
        options = ("--registry", f"127.0.0.1:{source.port}", "--cache-dir", str(cache))
        async with (
            serving(base, folders, scratch / "state", dtype=args.dtype, worker_options=options) as served,
            AsyncClient(served.router, served.registry) as client,
        ):
            source.upstream = served.registry
            digests = {entry.name: entry.current.artifact_digest async for entry in client.list_adapters()}
            bench = Bench(served, source, client, digests, cache, Seeds(args.seed))
            steady = served.adapters[:_STREAMS]
            await run(served.url, Work(steady, _STREAMS, _STREAMS, output_tokens=8, seed=bench.seeds.take()))
            yield bench


async def _measure(args: argparse.Namespace, base: Base, scratch: Path) -> list[Row]:
    rows = []
    with small_disk(scratch / "cache") as small:
        async with _bench(args, base, scratch, scratch / "cache") as bench:
            for index, case in enumerate(CASES):
                if case not in args.cases:
                    continue
                first = _STREAMS + index * _POISONED
                adapters = bench.served.adapters[first : first + _POISONED]
                if case == FULL_DISK and not small:
                    print("full disk: left out, as no small disk could be mounted", flush=True)
                    continue
                rows.append(await measure(bench, case, adapters, args.turns, args.rate))
    return rows


def main() -> int:
    """Run the benchmark; exits 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--base", help="base model folder or hub id; default: the demo base")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--turns", type=int, default=4, help="turns of each side")
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second for adapters that cannot be had")
    parser.add_argument("--seed", type=int, default=1, help="prompts are made from it; use a fresh one per run")
    parser.add_argument("--no-record", action="store_true", help="do not write bench/results/")
    args = parser.parse_args()
    base = resolve_base(args.base, None, lambda text: print(text, file=sys.stderr))
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-") as scratch:
        rows = asyncio.run(_measure(args, base, Path(scratch)))
    record("poison", rows, write=not args.no_record)
    return 1 if any(row["errors"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
