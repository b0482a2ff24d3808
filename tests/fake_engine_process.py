"""The real engine process around a `FakeRunner`: same options, same mailbox, no model.

Start it with `python -m tests.fake_engine_process --fd N --base-dir ANY ...`. Behaviour beside the options comes from
the environment:
  FAKE_ENGINE_STEP_S         seconds of each step (0)
  FAKE_ENGINE_VOCAB_SIZE     (256)
  FAKE_ENGINE_EOS            end-of-sequence token id (0); generated only on `Trigger.EOS_SOON`
  FAKE_ENGINE_CONTEXT        model's context in tokens (256), unless --max-context-tokens is less
  FAKE_ENGINE_TOTAL_BLOCKS   KV blocks of 16 tokens (64)
  FAKE_ENGINE_TRIGGERS       1: the first prompt token may be a `Trigger` (1 fail step, 2 crash, 3 hang, 4 eos soon)
  FAKE_ENGINE_START_FAILURE  a reason: StartFailed with it instead of Ready
  FAKE_ENGINE_START_S        seconds until Ready (0)
  FAKE_ENGINE_START_GATE     a path: not Ready until there is a file
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from loraplex.errors import BY_REASON
from tests.fake_runner import FakeRunner
from worker.engine_process import EngineOptions, OpenedRunner, parse_options, prepare_process, run_engine


def open_fake(options: EngineOptions) -> OpenedRunner:
    def told(name: str, default: str) -> str:
        return os.environ.get(f"FAKE_ENGINE_{name}", default)

    time.sleep(float(told("START_S", "0")))
    gate = told("START_GATE", "")
    while gate and not Path(gate).exists():
        time.sleep(0.01)
    reason = told("START_FAILURE", "")
    if reason:
        raise BY_REASON[reason]("the fake engine was told not to start")
    context = int(told("CONTEXT", "256"))
    return FakeRunner(
        vocab_size=int(told("VOCAB_SIZE", "256")),
        eos_token=int(told("EOS", "0")),
        max_context_tokens=min(context, options.max_context_tokens or context),
        total_blocks=int(told("TOTAL_BLOCKS", "64")),
        step_s=float(told("STEP_S", "0")),
        triggers=told("TRIGGERS", "") == "1",
        host_budget_bytes=options.host_cache_bytes or 0,
    )


def main(argv: Sequence[str]) -> int:
    options = parse_options(argv)
    prepare_process(options)
    return run_engine(options, open_fake)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
