"""Threads that bring adapters into device slots beside the running steps. Knows files and slots, not requests."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

LOADER_THREADS: Final = 2


@dataclass(frozen=True, slots=True)
class Loaded:
    """How a load ended: with the adapter's bytes on the device, or with the error that it raised."""

    slot: int
    device_bytes: int
    error: Exception | None


class Loader:
    """Runs `prepare(slot, path)` on its own threads; `on_done` is called on such a thread after each load.

    The threads are daemons: a load that hangs must not keep the process from ending.
    """

    def __init__(self, prepare: Callable[[int, Path], int], on_done: Callable[[], None]) -> None:
        self._prepare = prepare
        self._on_done = on_done
        self._orders: queue.SimpleQueue[tuple[int, Path] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Loaded] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"adapter-loader-{number}", daemon=True)
            for number in range(LOADER_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, slot: int, path: Path) -> None:
        """Order a load; it starts when a thread is free."""
        self._orders.put((slot, path))

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
            slot, path = order
            try:
                loaded = Loaded(slot, self._prepare(slot, path), None)
            except Exception as error:  # noqa: BLE001 - a bad adapter fails its requests, never the engine
                loaded = Loaded(slot, 0, error)
            self._done.put(loaded)
            self._on_done()
