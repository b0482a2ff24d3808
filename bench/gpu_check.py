"""One look at a GPU: every Triton kernel against the reference, its bytes/s, and decode with adapters against without.

Llama-3.1-8B's shapes with random weights made on the device; nothing is downloaded. Decode is the worker's own runner,
with its graphs and without. Takes minutes on an H200, half of them compiling. Prints what it finds and appends one JSON
line to bench/results/gpu_check.jsonl. Exit status: 0, 1 when a kernel is wrong, 2 without a CUDA device.

Run: python -m bench.gpu_check [--batches 1 8 32 64] [--ranks 16 64] [--seconds 270] [--no-record]
     TRITON_INTERPRET=1 python -m bench.gpu_check --dry-run      (toy sizes in the interpreter: does this program run?)
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, Literal

import torch
import triton

from bench.gpu_checks import DRAWN, checks, drawing
from bench.gpu_model import LLAMA_8B, TOY, Base, Shapes, attention_alone, fill_slots, lora_alone
from bench.record import record
from worker.engine.plan import StepPlan
from worker.kernels.triton.tiles import Format

FORMATS: Final = (Format.BF16, Format.INT8, Format.INT4)
COLUMNS: Final = ("what", "rank", "format", "batch", "ms", "plain_ms", "of_base", "of_floor", "of_copy")
"""plain_ms: without graphs, or drawn by torch; of_base: the base's step time by this one's; of_floor: this by what its
bytes take; of_copy: bytes/s by a copy's. Steps are measured on the host, from plan to tokens; kernels alone by the
device's clock.
"""
Row = dict[str, object]


class Clock:
    """Milliseconds of a call: median over repetitions, by the device's clock where it has one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def time(self, call: Callable[[], object], repeats: int = 20) -> float:
        """Call twice to warm up, then `repeats` times."""
        if self.device.type != "cuda":
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e3
        call()
        call()
        taken: list[float] = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            call()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end))
        return statistics.median(taken)

    def wall(self, call: Callable[[], object], repeats: int = 20) -> float:
        """Time a call that waits for the device itself, by the host's clock."""
        if self.device.type != "cuda":
            return self.time(call)
        call()
        call()
        taken: list[float] = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            taken.append((time.perf_counter() - start) * 1e3)
        return statistics.median(taken)

    def graph(self, call: Callable[[], object]) -> Callable[[], object]:
        """Capture a call and return its replay; the call itself where there is no device."""
        if self.device.type != "cuda":
            return call
        warm = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        warm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm):  # compiles, and lets libraries take their workspaces
            call()
            call()
        torch.cuda.current_stream().wait_stream(warm)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            call()
        return captured.replay

    def copy_bytes_per_s(self) -> float:
        """Bytes read and written per second by a large copy."""
        count = 2 << 30 if self.device.type == "cuda" else 1 << 20
        source = torch.empty(count, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * count / (self.time(lambda: target.copy_(source)) / 1e3)


def measure(shapes: Shapes, clock: Clock, args: argparse.Namespace, copy: float, deadline: float) -> Iterator[Row]:
    """Yield one row per measurement: whole steps of the worker's runner, and the kernels by themselves."""
    device, most = clock.device, max(args.batches)
    chunk = shapes.attention.block_elements * 2
    # 16-bit tiles of the largest rank, with a little for scales and for what chunks leave unused
    room = int(shapes.adapter_elements(max(args.ranks)) * 2 * 1.03 / chunk) + 4
    base = Base(shapes, device, batch=most, adapter_chunks=most * room)
    base.announce()
    began = time.monotonic()
    base.without.prepare()
    compiled = time.monotonic()
    base.with_graphs.prepare()
    yield {"what": "compile", "ms": (compiled - began) * 1e3}
    yield {"what": "capture", "ms": (time.monotonic() - compiled) * 1e3}
    base_ms: dict[int, float] = {}
    for batch in args.batches:
        row = _steps(base, clock, batch, None)
        base_ms[batch] = float(str(row["ms"]))
        kv_bytes = batch * shapes.context * chunk // 16
        row["of_floor"] = base_ms[batch] / ((shapes.weight_bytes + kv_bytes) / copy * 1e3)
        yield {"what": "base", **row}
        ms = clock.time(clock.graph(attention_alone(base, batch)))
        yield {"what": "attention", "batch": batch, "ms": ms, "of_copy": kv_bytes / (ms / 1e3) / copy}
    for name in DRAWN:
        for batch in sorted({min(args.batches), most}):
            by_kernel, by_torch = drawing(shapes, device, name, batch)
            row = {"batch": batch, "ms": clock.time(by_kernel), "plain_ms": clock.time(by_torch)}
            yield {"what": f"draw {name}", **row}
    for rank in args.ranks:
        for fmt in FORMATS:
            image = fill_slots(base, fmt, rank)
            for batch in args.batches:
                if time.monotonic() > deadline:
                    yield {"what": "out of time", "rank": rank, "format": fmt.name, "batch": batch}
                    return
                row = _steps(base, clock, batch, list(range(batch)))
                row["of_base"] = base_ms[batch] / float(str(row["ms"]))
                yield {"what": "mixed", "rank": rank, "format": fmt.name, **row}
            kernels: tuple[tuple[Literal["shrink", "expand"], float], ...]
            kernels = (("shrink", _share_of_a(shapes)), ("expand", 1 - _share_of_a(shapes)))
            for kernel, share in kernels:
                ms = clock.time(clock.graph(lora_alone(base, most, kernel=kernel)))
                moved = image.tile_bytes * most * share
                yield {
                    "what": kernel, "rank": rank, "format": fmt.name, "batch": most, "ms": ms,
                    "of_copy": moved / (ms / 1e3) / copy,
                }  # fmt: skip


def _steps(base: Base, clock: Clock, batch: int, slots: list[int] | None) -> Row:
    """Time whole steps as the engine sees them: laid out, computed, sampled, and the tokens read."""
    plan = StepPlan(1, (), tuple(base.sequences(batch, slots)), ())
    return {
        "batch": batch,
        "ms": clock.wall(partial(base.with_graphs.execute, plan)),
        "plain_ms": clock.wall(partial(base.without.execute, plan), 5),
    }


def _share_of_a(shapes: Shapes) -> float:
    a = sum(len(site.widths) * site.in_features for site in shapes.sites)
    return a / (a + sum(sum(site.widths) for site in shapes.sites))


def _line(row: Row | None) -> str:
    """Return one line of the table, or its head."""
    cells = []
    for name in COLUMNS:
        value = name if row is None else row.get(name, "")
        cells.append(f"{value:10.3f}" if isinstance(value, float) else f"{value!s:>10}")
    return " ".join(cells)


def main(argv: list[str] | None = None) -> int:
    """Run everything and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--seconds", type=float, default=270.0, help="start no measurement after so many")
    parser.add_argument(
        "--dry-run", action="store_true", help="toy sizes, in Triton's interpreter (TRITON_INTERPRET=1)"
    )
    parser.add_argument("--no-record", action="store_true")
    args = parser.parse_args(argv)
    started = time.monotonic()
    if args.dry_run:
        if not triton.knobs.runtime.interpret:
            print("a dry run needs TRITON_INTERPRET=1 in the environment", file=sys.stderr)
            return 2
        args.batches, args.ranks, args.no_record = [2], [20], True
        device, shapes, name = torch.device("cpu"), TOY, "interpreter"
    elif not torch.cuda.is_available():
        print("no CUDA device here: nothing was checked", file=sys.stderr)
        return 2
    else:
        device, shapes, name = torch.device("cuda"), LLAMA_8B, torch.cuda.get_device_name()
    torch.manual_seed(0)
    described = f"{name}, torch {torch.__version__}, triton {triton.__version__}"
    print(described, flush=True)
    with torch.inference_mode():
        found = []
        for check in checks(shapes, device):
            found.append(check)
            if not check.ok:
                print(f"WRONG  {check.name}: error {check.error:.2e}", flush=True)
        wrong = [check.name for check in found if not check.ok]
        worst = max(found, key=lambda check: check.error)
        print(
            f"{len(found)} checks, {len(wrong)} wrong; the largest error is {worst.error:.2e}, of {worst.name}",
            flush=True,
        )
        clock = Clock(device)
        copy = clock.copy_bytes_per_s()
        print(f"copy bandwidth {copy / 1e12:.2f} TB/s", flush=True)
        rows = []
        print(_line(None), flush=True)
        for row in measure(shapes, clock, args, copy, started + args.seconds):
            rows.append(row)
            print(_line(row), flush=True)
    summary = {
        "what": "checks", "checks": len(found), "wrong": wrong, "worst_error": worst.error, "copy_bytes_per_s": copy,
        "seconds": time.monotonic() - started,
    }  # fmt: skip
    record("gpu_check", [summary, *rows], device=described, write=not args.no_record)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
