"""The signals that end a service process: the first asks it to drain, the second ends it at once."""

from __future__ import annotations

import asyncio
import signal

import structlog

log = structlog.get_logger(__name__)


def stop_on_signals() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set. A second signal ends the process at once."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        if event.is_set():
            log.warning("lifecycle.forced_exit", signal=number.name)
            raise SystemExit(128 + number)
        log.info("lifecycle.stopping", signal=number.name)
        event.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return event
