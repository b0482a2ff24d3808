"""The engine process of a worker: parses its options, opens the model, says Ready, runs the loop.

Started by the front end as `python -m worker.engine_process --fd N <options>`, with one end of a Unix stream socket
pair as file descriptor N. Exits 0 on Shutdown or when the front end is gone, 1 when it cannot go on, 3 when it could
not start (after StartFailed). Torch is imported by the runner alone, here inside `main`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import structlog

from common.telemetry import LogFormat, configure_logs
from loraplex.errors import ArtifactUnreachable, LoraplexError
from worker.cores import usable_cores
from worker.engine.config import EngineConfig
from worker.engine.inbox import Inbox, MailboxClosed
from worker.engine.loader import Loader
from worker.engine.loop import EngineLoop
from worker.engine.plan import Runner
from worker.engine.rates import StepRates
from worker.engine.refusal import Problem
from worker.engine.scheduler import Scheduler
from worker.mailbox import Ready, StartFailed

EXIT_BROKEN: Final = 1
EXIT_START_FAILED: Final = 3
_FLUSH_S: Final = 5.0
_LOADER_JOIN_S: Final = 2.0
_LOADER_NICENESS: Final = 5
_SWITCH_S: Final = 0.0005
"""How long a thread that loads an adapter may keep the interpreter from the one that runs steps, which takes it again a
few times in each: ten times less than by default."""
_PR_SET_PDEATHSIG: Final = 1
_STEP_S: Final = 0.2
_FEWEST_STEP_TOKENS: Final = 64
_MOST_STEP_TOKENS: Final = 2048

log = structlog.get_logger(__name__)


class OpenedRunner(Runner, Protocol):
    """A runner with its model loaded, and what it knows of itself."""

    device: str
    dtype: str
    vocab_size: int
    max_context_tokens: int
    block_tokens: int
    total_blocks: int
    chunk_bytes: int
    adapter_chunk_bytes: int
    """Bytes of a chunk that an adapter can use; 0 where adapters live outside the arena."""
    eos_token_ids: frozenset[int]
    host_budget_bytes: int
    """Bytes that adapters may take in page-locked host memory; 0 where there is no such tier."""

    def calibrate(self) -> tuple[float, float]:
        """Measure prefill and decode speed, in tokens per second."""
        ...


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options of an engine process, as the front end passes them."""

    fd: int
    base_dir: Path
    base_digest: str
    device: str
    dtype: str
    base_quantization: str
    arena_bytes: int | None
    max_context_tokens: int | None
    max_running_requests: int
    max_resident_adapters: int
    max_adapter_bytes: int | None
    max_vocabulary_bytes: int
    host_cache_bytes: int | None
    max_prefill_tokens: int | None
    max_adapter_wait_s: float
    mixed_batch_ratio: float
    prefix_cache: bool
    cuda_graphs: bool
    async_scheduling: bool | None
    threads: int | None
    merged_artifact: Path | None
    log_level: str
    log_format: LogFormat


def parse_options(argv: Sequence[str]) -> EngineOptions:
    """Parse the command line; prints what is wrong and exits 2 on a bad one."""
    parser = argparse.ArgumentParser(prog="python -m worker.engine_process", allow_abbrev=False)
    parser.add_argument("--fd", type=int, required=True, help="the mailbox: an inherited Unix stream socket")
    parser.add_argument("--base-dir", type=Path, required=True, help="Hugging Face folder of the base model")
    parser.add_argument("--base-digest", default="", help="its digest, if known; it is computed otherwise")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--base-quantization", default="none", choices=["none", "int8"])
    parser.add_argument("--arena-bytes", type=_positive, default=None, help="default: the runner decides")
    parser.add_argument("--max-context-tokens", type=_positive, default=None, help="default: the model's")
    parser.add_argument("--max-running-requests", type=_positive, default=64)
    parser.add_argument("--max-resident-adapters", type=_positive, default=32)
    parser.add_argument("--max-adapter-bytes", type=_positive, default=None, help="default: bound by slots and arena")
    parser.add_argument("--max-vocabulary-bytes", type=_positive, default=2**30, help="adapters' embeddings, heads")
    parser.add_argument("--host-cache-bytes", type=_whole, default=None, help="default: the runner decides")
    parser.add_argument("--max-prefill-tokens", type=_positive, default=None, help="default: a step of 0.2 s")
    parser.add_argument("--max-adapter-wait-s", type=float, default=2.0, help="how long one may be overtaken")
    parser.add_argument("--mixed-batch-ratio", type=float, default=1.0, help="share that runs with mixed adapters")
    parser.add_argument("--prefix-cache", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--cuda-graphs", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--async-scheduling", action=argparse.BooleanOptionalAction, default=None, help="default: on a GPU"
    )
    parser.add_argument("--threads", type=_positive, default=None, help="computing threads; default: one a core")
    parser.add_argument("--merged-artifact", type=Path, default=None, help="packed adapter to fold into the base")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    parser.add_argument("--log-format", default="auto", choices=["auto", "console", "json"])
    return EngineOptions(**vars(parser.parse_args(argv)))


def run_engine(options: EngineOptions, open_runner: Callable[[EngineOptions], OpenedRunner]) -> int:
    """Open the runner, serve the mailbox at `options.fd` until its end, and return the exit status."""
    inbox = Inbox(socket.socket(fileno=options.fd))
    try:
        started = _start(options, open_runner)
        if isinstance(started, StartFailed):
            inbox.send(started)
            return EXIT_START_FAILED
        runner, config, ready = started
        inbox.send(ready)
        rates = StepRates(ready.prefill_tokens_per_second, ready.decode_tokens_per_second)
        loader = Loader(runner.prepare_adapter, inbox.wake, on_start=yield_to_steps)
        try:
            ahead = runner.device != "cpu" if options.async_scheduling is None else options.async_scheduling
            scheduler = Scheduler(config, rates)
            EngineLoop(runner, scheduler, inbox, loader, describe=describe, async_scheduling=ahead).run()
        finally:
            loader.close(timeout_s=_LOADER_JOIN_S)
    except MailboxClosed:
        log.info("engine.front_end_gone")
    except Exception:  # EngineBroken, MailboxBroken, or a bug: a fresh process is better off in each case
        log.exception("engine.broken")
        return EXIT_BROKEN
    finally:
        inbox.close(flush_s=_FLUSH_S)
    return 0


def _start(
    options: EngineOptions, open_runner: Callable[[EngineOptions], OpenedRunner]
) -> tuple[OpenedRunner, EngineConfig, Ready] | StartFailed:
    try:
        runner = open_runner(options)
        gc.collect()
        gc.freeze()  # the model's objects stay; collections during steps need not walk them
        prefill, decode = runner.calibrate()
        config = _config(options, runner, prefill)
    except LoraplexError as error:
        return StartFailed(error.reason, error.message)
    except Exception:
        log.exception("engine.start_failed")
        return StartFailed("INTERNAL", "the engine could not start; the worker's log says why")
    ready = Ready(
        device=runner.device,
        dtype=runner.dtype,
        vocab_size=config.vocab_size,
        max_context_tokens=config.max_context_tokens,
        block_tokens=config.block_tokens,
        total_blocks=config.total_blocks,
        prefill_tokens_per_second=prefill,
        decode_tokens_per_second=decode,
        max_running_requests=config.max_running_requests,
        base_quantization=options.base_quantization,
        chunk_bytes=config.chunk_bytes,
        host_budget_bytes=runner.host_budget_bytes,
    )
    return runner, config, ready


def _config(options: EngineOptions, runner: OpenedRunner, prefill_tokens_per_second: float) -> EngineConfig:
    kv_tokens = runner.total_blocks * runner.block_tokens
    if kv_tokens < runner.max_context_tokens:
        log.warning("engine.context_capped_by_arena", kv_tokens=kv_tokens, model_tokens=runner.max_context_tokens)
    return EngineConfig(
        vocab_size=runner.vocab_size,
        eos_token_ids=runner.eos_token_ids,
        max_context_tokens=min(runner.max_context_tokens, kv_tokens),
        block_tokens=runner.block_tokens,
        total_blocks=runner.total_blocks,
        chunk_bytes=runner.chunk_bytes,
        adapter_chunk_bytes=runner.adapter_chunk_bytes,
        max_running_requests=options.max_running_requests,
        max_prefill_tokens=options.max_prefill_tokens or step_tokens(prefill_tokens_per_second),
        max_resident_adapters=options.max_resident_adapters,
        max_adapter_bytes=options.max_adapter_bytes,
        max_vocabulary_bytes=options.max_vocabulary_bytes,
        max_adapter_wait_s=options.max_adapter_wait_s,
        mixed_batch_ratio=options.mixed_batch_ratio,
        prefix_cache=options.prefix_cache,
        base_identity=" ".join(
            (options.base_digest, runner.dtype, options.base_quantization)
            + (() if options.merged_artifact is None else (options.merged_artifact.name,))
        ),
    )


def step_tokens(prefill_tokens_per_second: float) -> int:
    """Return how many tokens a step computes where nobody said: so many that it does not hold up running answers."""
    return min(max(int(prefill_tokens_per_second * _STEP_S), _FEWEST_STEP_TOKENS), _MOST_STEP_TOKENS)


def describe(error: Exception) -> Problem:
    """Return the words for an error of an adapter's load: its own if it is typed, else what a caller may know."""
    if isinstance(error, OSError):
        error = ArtifactUnreachable(
            f"the adapter's file cannot be read on this worker ({error.strerror}); trying again fetches it anew"
        )
    if isinstance(error, LoraplexError):
        return Problem(error.reason, error.message, error.metadata, error.retry_after_s)
    log.error("engine.load_raised", exc_info=error)
    return Problem("INTERNAL", "the adapter could not be loaded; the worker's log says why", {"stage": "load"})


def yield_to_steps() -> None:
    """Have the calling thread take a core from the threads of steps for less than its share: answers go on meanwhile.

    Where a core is idle, as it mostly is while few requests run, this costs a load nothing.
    """
    with contextlib.suppress(OSError):  # what the system does not allow is no reason to load nothing
        own = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), own + _LOADER_NICENESS)


def prepare_process(options: EngineOptions) -> None:
    """Make this process live and die with the front end, and log as it does."""
    sys.setswitchinterval(_SWITCH_S)
    configure_logs("engine", level=options.log_level, log_format=options.log_format)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the front end decides
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _open_model_runner(options: EngineOptions) -> OpenedRunner:
    import torch  # noqa: PLC0415 - only a process that computes pays for it

    from loraplex.manifest import read_manifest  # noqa: PLC0415
    from worker.model.runner import ModelRunner  # noqa: PLC0415

    torch.set_num_threads(1)  # for what is left to torch; the kernels have their own pool
    return ModelRunner.open(
        options.base_dir,
        device=options.device,
        dtype=options.dtype,
        base_quantization=options.base_quantization,
        arena_bytes=options.arena_bytes,
        max_context_tokens=options.max_context_tokens,
        max_running_requests=options.max_running_requests,
        max_resident_adapters=options.max_resident_adapters,
        max_prefill_tokens=options.max_prefill_tokens or _MOST_STEP_TOKENS,
        base_digest=options.base_digest or read_manifest(options.base_dir).digest(),
        threads=options.threads or usable_cores(),
        cuda_graphs=options.cuda_graphs,
        max_vocabulary_bytes=options.max_vocabulary_bytes,
        merged_artifact=options.merged_artifact,
        host_cache_bytes=options.host_cache_bytes,
    )


def _whole(text: str) -> int:
    return 0 if text == "0" else _positive(text)


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def main(argv: Sequence[str]) -> int:
    """Run an engine process; returns its exit status."""
    options = parse_options(argv)
    prepare_process(options)
    return run_engine(options, _open_model_runner)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
