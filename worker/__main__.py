"""Runs a worker: `python -m worker --base-dir DIR --cache-dir DIR --registry HOST:PORT`. Wires, decides nothing."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from common.config import load_settings
from common.exposure import warn_where_open
from common.lifecycle import stop_on_signals
from common.telemetry import configure_logs
from common.tracing import tracing
from loraplex.errors import LoraplexError
from worker.app import WorkerApp
from worker.engine_link import EngineStartError
from worker.settings import WorkerSettings


async def _run(settings: WorkerSettings) -> None:
    stop = stop_on_signals()
    await WorkerApp(settings).run(stop)


def main(argv: Sequence[str]) -> int:
    """Run a worker until a signal; returns the exit status: 1, after one line that says why, where it cannot run."""
    settings = load_settings(WorkerSettings, "worker", argv)
    configure_logs("worker", level=settings.log_level, log_format=settings.log_format)
    warn_where_open(settings)
    problems: list[BaseException] = []
    try:
        with tracing("worker", settings.otlp_endpoint, instance=settings.worker_id):
            asyncio.run(_run(settings))
    except* (LoraplexError, EngineStartError) as group:
        problems = list(_leaves(group))
    for problem in problems:
        print(f"worker: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _leaves(group: BaseExceptionGroup[BaseException]) -> Sequence[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
