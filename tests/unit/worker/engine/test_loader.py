"""Loader threads: two at a time, errors are reported, a hanging load does not keep the process."""

from __future__ import annotations

import threading
from pathlib import Path

from worker.engine.loader import Loaded, Loader
from worker.engine.plan import AdapterLoad


def test_two_loads_run_side_by_side_and_a_third_waits() -> None:
    started: list[int] = []
    two = threading.Event()
    gate = threading.Event()
    done = threading.Semaphore(0)

    def prepare(slot: int, path: Path, chunk_ids: tuple[int, ...]) -> AdapterLoad:
        started.append(slot)
        if len(started) == 2:
            two.set()
        assert gate.wait(10)
        return AdapterLoad(len(path.name), len(chunk_ids))

    loader = Loader(prepare, done.release)
    for slot in (4, 5, 6):
        loader.start(slot, Path("x" * slot), (7,) * slot)
    assert two.wait(10)
    assert loader.completed() == []
    assert sorted(started) == [4, 5]
    gate.set()
    for _ in range(3):
        assert done.acquire(timeout=10)
    assert sorted(loader.completed(), key=lambda loaded: loaded.slot) == [
        Loaded(4, AdapterLoad(4, 4), 0.0),
        Loaded(5, AdapterLoad(5, 5), 0.0),
        Loaded(6, AdapterLoad(6, 6), 0.0),
    ]
    assert loader.completed() == []
    loader.close(timeout_s=10)


def test_an_error_is_an_outcome_and_the_thread_goes_on() -> None:
    done = threading.Semaphore(0)
    error = RuntimeError("bad")

    def prepare(slot: int, path: Path, chunk_ids: tuple[int, ...]) -> AdapterLoad:
        if slot == 0:
            raise error
        return AdapterLoad(1, 0)

    loader = Loader(prepare, done.release)
    for _ in range(3):  # more than there are threads
        loader.start(0, Path("a"), ())
        assert done.acquire(timeout=10)
        assert loader.completed() == [Loaded(0, error, 0.0)]
    loader.start(1, Path("a"), ())
    assert done.acquire(timeout=10)
    assert loader.completed() == [Loaded(1, AdapterLoad(1, 0), 0.0)]
    loader.close(timeout_s=10)


def test_closing_waits_for_a_hanging_load_only_so_long() -> None:
    gate = threading.Event()

    def hang(slot: int, path: Path, chunk_ids: tuple[int, ...]) -> AdapterLoad:
        gate.wait(30)
        return AdapterLoad(0, 0)

    loader = Loader(hang, lambda: None)
    loader.start(0, Path("a"), ())
    loader.close(timeout_s=0.05)
    assert all(thread.daemon for thread in loader._threads)
    gate.set()


class Held:
    """A loader of one thread, whose loads wait for `gate`."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.first = threading.Event()
        self.gate = threading.Event()
        self.done = threading.Semaphore(0)
        self.loader = Loader(self._prepare, self.done.release, num_threads=1)

    def _prepare(self, slot: int, path: Path, chunk_ids: tuple[int, ...]) -> AdapterLoad:
        self.begun.append(slot)
        self.first.set()
        assert self.gate.wait(10)
        return AdapterLoad(1, 0)

    def start(self, slot: int, urgency: int) -> None:
        self.loader.start(slot, Path("a"), (), urgency)

    def finish(self, count: int) -> list[int]:
        self.gate.set()
        for _ in range(count):
            assert self.done.acquire(timeout=10)
        self.loader.close(timeout_s=10)
        return self.begun


def test_the_most_urgent_load_begins_first_and_one_may_become_so() -> None:
    held = Held()
    held.start(0, 0)
    assert held.first.wait(10)
    for slot, urgency in ((1, 2), (2, 1), (3, -1), (4, 1), (5, 2)):
        held.start(slot, urgency)
    held.loader.hurry(5)
    held.loader.hurry(0)  # has begun
    held.loader.hurry(9)  # is not known
    assert held.finish(6) == [0, 3, 5, 2, 4, 1]


def test_a_load_that_has_not_begun_can_be_dropped() -> None:
    held = Held()
    held.start(0, 0)
    assert held.first.wait(10)
    held.start(1, 0)
    held.start(2, 0)
    assert held.loader.cancel(1)
    assert not held.loader.cancel(1)
    assert not held.loader.cancel(0)
    assert held.finish(2) == [0, 2]
    assert [loaded.slot for loaded in held.loader.completed()] == [0, 2]


def test_who_waits_hears_of_the_end_of_all_loads_or_gives_up() -> None:
    held = Held()
    held.loader.wait(10)  # nothing to wait for
    held.start(0, 0)
    assert held.first.wait(10)
    held.loader.wait(0.01)
    assert held.loader.completed() == []
    threading.Timer(0.05, held.gate.set).start()
    held.loader.wait(10)
    assert [loaded.slot for loaded in held.loader.completed()] == [0]
    held.loader.close(timeout_s=10)
