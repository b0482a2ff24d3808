"""Threads that bring adapters into device slots beside the running steps. Knows files and slots, not requests."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Final

from worker.engine.plan import AdapterLoad
from worker.engine.residency import FOR_REQUEST

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


@dataclass(frozen=True, slots=True)
class _Order:
    """A load that no thread has begun."""

    path: Path
    chunk_ids: tuple[int, ...]
    urgency: int
    number: int
    """In the order in which they came."""


class Loader:
    """Runs `prepare(slot, path, chunk_ids)` on its own threads; `on_done` is called on such a thread after each load.

    A thread begins the load of the lowest urgency first, of equals the one that came first. The threads are daemons: a
    load that hangs must not keep the process from ending.
    """

    def __init__(
        self,
        prepare: Prepare,
        on_done: Callable[[], None],
        *,
        num_threads: int = LOADER_THREADS,
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the threads; each calls `on_start` first."""
        self._prepare = prepare
        self._on_done = on_done
        self._on_start = on_start
        self._orders: dict[int, _Order] = {}  # by slot
        self._changed = threading.Condition()  # guards the orders
        self._closed = False
        self._num_begun = 0  # and not ended
        self._numbers = count()
        self._done: queue.SimpleQueue[Loaded] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"adapter-loader-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, slot: int, path: Path, chunk_ids: tuple[int, ...], urgency: int = FOR_REQUEST) -> None:
        """Order a load; it starts when a thread is free and nothing more urgent waits."""
        with self._changed:
            self._orders[slot] = _Order(path, chunk_ids, urgency, next(self._numbers))
            self._changed.notify()

    def hurry(self, slot: int) -> None:
        """Make a load that has not begun as urgent as any; one that has is ignored."""
        with self._changed:
            order = self._orders.get(slot)
            if order is not None:
                self._orders[slot] = _Order(order.path, order.chunk_ids, FOR_REQUEST, order.number)

    def cancel(self, slot: int) -> bool:
        """Drop a load that has not begun; returns whether it was: nothing more is heard of it then."""
        with self._changed:
            return self._orders.pop(slot, None) is not None

    def wait(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` until all loads have ended."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._orders or self._num_begun), timeout_s)

    def completed(self) -> list[Loaded]:
        """Return the loads that ended since the last call."""
        done: list[Loaded] = []
        while not self._done.empty():  # only the caller takes from it
            done.append(self._done.get())
        return done

    def close(self, *, timeout_s: float) -> None:
        """Start no more loads and wait up to `timeout_s` for each thread's present one."""
        with self._changed:
            self._closed = True
            self._orders.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout_s)

    def _next(self) -> tuple[int, _Order] | None:
        """Wait for an order and take it; None once closed."""
        with self._changed:
            while not (self._orders or self._closed):
                self._changed.wait()
            if self._closed:
                return None
            slot = min(self._orders, key=lambda slot: (self._orders[slot].urgency, self._orders[slot].number))
            self._num_begun += 1
            return slot, self._orders.pop(slot)

    def _run(self) -> None:
        self._on_start()
        while (taken := self._next()) is not None:
            slot, order = taken
            outcome: AdapterLoad | Exception
            started_s = time.monotonic()
            try:
                outcome = self._prepare(slot, order.path, order.chunk_ids)
            except Exception as error:  # noqa: BLE001 - a bad adapter fails its requests, never the engine
                outcome = error
            self._done.put(Loaded(slot, outcome, time.monotonic() - started_s))
            with self._changed:
                self._num_begun -= 1
                self._changed.notify_all()
            self._on_done()
