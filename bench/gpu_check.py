"""One look at a GPU: every Triton kernel against the reference, its bytes/s, and decode with adapters against without.

Llama-3.1-8B's shapes with random weights made on the device; nothing is downloaded. Takes minutes on an H200,
half of them compiling. Prints what it finds and appends one JSON line to bench/results/gpu_check.jsonl. Exit status: 0,
1 when a kernel is wrong, 2 without a CUDA device.

Run: python -m bench.gpu_check [--batches 1 8 32 64] [--ranks 16 64] [--seconds 270] [--no-record]
     TRITON_INTERPRET=1 python -m bench.gpu_check --dry-run      (toy sizes in the interpreter: does this program run?)
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Final

import torch
import triton

from bench.gpu_checks import checks
from bench.gpu_model import LLAMA_8B, TOY, Adapters, Base, DecodeStep, Shapes
from bench.record import TREE, commit
from worker.kernels.triton.attention import attention
from worker.kernels.triton.lora import expand, shrink
from worker.kernels.triton.platform import Platform
from worker.kernels.triton.tiles import Format

RESULTS: Final = TREE / "bench" / "results" / "gpu_check.jsonl"
FORMATS: Final = (Format.BF16, Format.INT8, Format.INT4)
COLUMNS: Final = ("what", "rank", "format", "batch", "ms", "eager_ms", "of_base", "of_floor", "of_copy")
"""of_base: the base's step time by this one's; of_floor: this by what its bytes take; of_copy: bytes/s by a copy's."""
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
    """Yield one row per measurement: decode steps with and without adapters, and the kernels by themselves."""
    device, most = clock.device, max(args.batches)
    base_bytes = shapes.weight_bytes
    chunk = shapes.attention.chunk_bytes(2)
    # 16-bit tiles of the largest rank, with a little for scales and for what chunks leave unused
    room = int(shapes.adapter_elements(max(args.ranks)) * 2 * 1.03 / chunk) + 4
    base = Base(shapes, device, batch=most, adapter_chunks=most * room)
    base_ms: dict[int, float] = {}
    for batch in args.batches:
        step = DecodeStep(base, batch, None, [])
        base_ms[batch] = clock.time(clock.graph(step))
        kv_bytes = batch * shapes.context * chunk // 16
        floor = (base_bytes + kv_bytes) / copy * 1e3
        eager = clock.time(step, 5)
        yield {
            "what": "base",
            "batch": batch,
            "ms": base_ms[batch],
            "eager_ms": eager,
            "of_floor": base_ms[batch] / floor,
        }
        run = clock.graph(partial(_attend, step))
        ms = clock.time(run)
        yield {"what": "attention", "batch": batch, "ms": ms, "of_copy": kv_bytes / (ms / 1e3) / copy}
    for rank in args.ranks:
        for fmt in FORMATS:
            adapters = Adapters(base, fmt, rank, most, frozenset(FORMATS))
            for batch in args.batches:
                if time.monotonic() > deadline:
                    yield {"what": "out of time", "rank": rank, "format": fmt.name, "batch": batch}
                    return
                step = DecodeStep(base, batch, adapters, list(range(batch)))
                ms = clock.time(clock.graph(step))
                row: Row = {"what": "mixed", "rank": rank, "format": fmt.name, "batch": batch, "ms": ms}
                row["of_base"] = base_ms[batch] / ms
                if batch == 32:
                    row["eager_ms"] = clock.time(step, 5)
                yield row
                if batch == most:
                    for kernel, share in ((shrink, _share_of_a(shapes)), (expand, 1 - _share_of_a(shapes))):
                        ms = clock.time(clock.graph(partial(step.lora_only, kernel)))
                        moved = adapters.bytes_each * batch * share
                        name = kernel.__name__
                        yield {
                            "what": name, "rank": rank, "format": fmt.name, "batch": batch, "ms": ms,
                            "of_copy": moved / (ms / 1e3) / copy,
                        }  # fmt: skip
            del adapters


def _attend(step: DecodeStep) -> None:
    shape = step.base.shapes.attention
    how = Platform.of(step.base.device, torch.bfloat16)
    for layer in range(shape.num_layers):
        attention(shape, how, step.q, step.base.arena.view(-1), layer, step.attention, step.room, step.attended)


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
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
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
    record = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["python", "-m", "bench.gpu_check", *sys.argv[1:]], "commit": commit(),
        "machine": {
            "device": name, "torch": torch.__version__, "triton": triton.__version__,
            "python": platform.python_version(),
        },
        "checks": len(found), "wrong": wrong, "worst_error": worst.error, "copy_bytes_per_s": copy, "rows": rows,
        "seconds": time.monotonic() - started,
    }  # fmt: skip
    print(json.dumps(record))
    if not args.no_record:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
