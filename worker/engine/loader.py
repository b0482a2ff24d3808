"""Threads that bring adapters into device slots beside the running steps. Knows files and slots, not requests."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from worker.engine.plan import AdapterLoad

LOADER_THREADS: Final = 2

Prepare = Callable[[int, Path, tuple[int, ...]], AdapterLoad]
"""`Runner.prepare_adapter`."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """How a load ended: with an adapter on the device, or with the error that it raised."""

    slot: int
    outcome: AdapterLoad | Exception
    seconds: float = field(compare=False)
    """What the load itself took, without its wait for a thread."""


class Loader:
    """Runs `prepare(slot, path, chunk_ids)` on its own threads; `on_done` is called on such a thread after each load.

    The threads are daemons: a load that hangs must not keep the process from ending.
    """

    def __init__(self, prepare: Prepare, on_done: Callable[[], None]) -> None:
        self._prepare = prepare
        self._on_done = on_done
        self._orders: queue.SimpleQueue[tuple[int, Path, tuple[int, ...]] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Loaded] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"adapter-loader-{number}", daemon=True)
            for number in range(LOADER_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, slot: int, path: Path, chunk_ids: tuple[int, ...]) -> None:
        """Order a load; it starts when a thread is free."""
        self._orders.put((slot, path, chunk_ids))

    def completed(self) -> list[Loaded]:
        """Return the loads that ended since the last call."""
        done: list[Loaded] = []
        while not self._done.empty():  # only the caller takes from it
            done.append(self._done.get())
        return done

    def close(self, *, timeout_s: float) -> None:
        """Start no more loads and wait up to `timeout_s` for each thread's present one."""
        for _ in self._threads:
            self._orders.put(None)
        for thread in self._threads:
            thread.join(timeout_s)

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            slot, path, chunk_ids = order
            outcome: AdapterLoad | Exception
            started_s = time.monotonic()
            try:
                outcome = self._prepare(slot, path, chunk_ids)
            except Exception as error:  # noqa: BLE001 - a bad adapter fails its requests, never the engine
                outcome = error
            self._done.put(Loaded(slot, outcome, time.monotonic() - started_s))
            self._on_done()
