"""Signals of long-running commands: the first asks to stop, the second forces it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
T = TypeVar("T")


class StopSignals:
    """Remembers the first signal that asked to stop. Install inside a running event loop."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.on_second: Callable[[], None] = lambda: None
        self._asked = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)

    async def unless_asked(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return what `work` returns, or None where a signal came first; it is cancelled then."""
        task, asked = asyncio.create_task(work), asyncio.create_task(self._asked.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            return await task if task.done() else None
        finally:
            for each in (task, asked):
                each.cancel()
            await asyncio.gather(task, asked, return_exceptions=True)

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C as shells expect; a service manager's SIGTERM is a success."""
        return 130 if self.first is signal.SIGINT else 0

    def _on_signal(self, number: signal.Signals) -> None:
        if self.first is None:
            self.first = number
            self._asked.set()
        else:
            self.on_second()
