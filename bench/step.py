"""Measure one decoding step inside the engine, without processes around it, and split it by operation.

Opens the base with random INT8 adapters of rank 16, and runs steps of 1, 8 and 32 requests with 100 tokens behind each,
all on the base and on eight adapters mixed.

Run: python -m bench.step [--base DIR] [--threads N] [--batch 1 8 32] [--no-record]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from bench.make_adapters import MODULES, linear_shapes, write_adapter
from bench.record import record
from common.adapter_format.base import read_linears
from common.adapter_format.packed import pack
from common.adapter_format.quantize import quantize
from common.adapter_format.validate import WEIGHTS_FILE, validate
from loraplex.cli.base_source import resolve_base
from loraplex.manifest import read_manifest
from worker.cores import usable_cores
from worker.engine.plan import BASE_SLOT, NewRequest, SequenceStep, StepPlan
from worker.kernels.cpu.backend import CpuBackend
from worker.kernels.cpu.pool import Pool
from worker.kernels.cpu.program import OPERATION, Op
from worker.mailbox import Sampling
from worker.model.runner import ModelRunner

ADAPTERS: Final = 8
POSITION: Final = 100
"""Tokens behind each request's new one."""
BLOCKS: Final = POSITION // 16 + 1
STEPS: Final = 15


class ProfilingPool(Pool):
    """A pool that can also run the operations of each kind by themselves and tell what they take."""

    def __init__(self, num_threads: int) -> None:
        super().__init__(num_threads)
        self.seconds: dict[str, float] | None = None
        """By operation, while profiling; None to run whole programs."""

    def run(self, program: NDArray[np.int64]) -> None:
        """See Pool."""
        if self.seconds is None:
            super().run(program)
            return
        super().run(program)
        # All of a kind as one program: to start one takes longer than most operations do. What they compute this time
        # is of no use.
        for kind in np.unique(program[:, OPERATION]):
            operations = np.ascontiguousarray(program[program[:, OPERATION] == kind])
            started_s = time.perf_counter()
            super().run(operations)
            name = Op(int(kind)).name.lower()
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started_s


def plan_of(batch: int, adapters: int, *, new: bool) -> StepPlan:
    """Return a step of `batch` requests, spread over the first `adapters` slots, or all on the base for 0."""
    sequences = tuple(
        SequenceStep(
            request_id=n,
            token_ids=(5,),
            position=POSITION,
            block_ids=tuple(range(n * BLOCKS, (n + 1) * BLOCKS)),
            adapter_slot=n % adapters if adapters else BASE_SLOT,
            sample=True,
        )
        for n in range(batch)
    )
    requests = tuple(NewRequest(n, (5,) * POSITION, Sampling(temperature=0.0)) for n in range(batch)) if new else ()
    return StepPlan(1, requests, sequences, ())


def load_adapters(runner: ModelRunner, folder: Path, scratch: Path) -> None:
    """Make random adapters, quantize them and bring them into the runner's slots and the arena's last chunks."""
    shapes, linears = linear_shapes(folder, MODULES), read_linears(read_manifest(folder))
    free = list(range(runner.total_blocks))
    for slot in range(ADAPTERS):
        made = write_adapter(scratch / str(slot), shapes, rank=16, dtype="bfloat16", seed=slot)
        exact = validate((made / "adapter_config.json").read_bytes(), made / WEIGHTS_FILE, linears)
        file = scratch / f"{slot}.packed"
        pack(quantize(exact, "int8").adapter, file)
        granted = -(-file.stat().st_size // runner.adapter_chunk_bytes) + 1
        runner.prepare_adapter(slot, file, tuple(free[-granted:]))
        del free[-granted:]


def measure(runner: ModelRunner, pool: ProfilingPool, batch: int, adapters: int) -> dict[str, object]:
    """Return the median step and what each kind of operation takes by itself."""
    runner.execute(plan_of(batch, adapters, new=True))
    step = plan_of(batch, adapters, new=False)
    times = []
    for _ in range(STEPS):
        started_s = time.perf_counter()
        runner.execute(step)
        times.append(time.perf_counter() - started_s)
    pool.seconds = {}
    for _ in range(STEPS):
        runner.execute(step)
    operations = {name: round(seconds / STEPS * 1e3, 2) for name, seconds in pool.seconds.items()}
    pool.seconds = None
    return {
        "case": f"{adapters} mixed" if adapters else "base",
        "batch": batch,
        "step_ms": round(statistics.median(times) * 1e3, 1),
        "slowest_ms": round(max(times) * 1e3, 1),
        "operations_ms": dict(sorted(operations.items(), key=lambda item: -item[1])),
    }


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--base", help="base model folder or hub id; default: the demo base")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--no-record", action="store_true", help="do not write bench/results/")
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = resolve_base(args.base, None, lambda text: print(text, file=sys.stderr)).folder
    pool = ProfilingPool(args.threads)
    runner = ModelRunner.open(
        folder,
        device="cpu",
        dtype="float32",
        arena_bytes=None,
        max_context_tokens=512,
        max_running_requests=max(args.batch),
        max_resident_adapters=ADAPTERS,
        max_prefill_tokens=256,
        base_digest=read_manifest(folder).digest(),
        backend=CpuBackend(pool),
    )
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-") as scratch:
        load_adapters(runner, folder, Path(scratch))
        for batch in args.batch:
            for adapters in (0, ADAPTERS):
                rows.append(measure(runner, pool, batch, adapters))
                print(json.dumps(rows[-1]), flush=True)
    record("step", rows, write=not args.no_record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
