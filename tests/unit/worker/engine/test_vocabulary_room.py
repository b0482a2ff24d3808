"""Embeddings and heads of adapters: no chunks for them, a budget of their own, and who leaves for whom."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.worker.engine.driver import CONFIG, Driver
from tests.unit.worker.engine.test_memory import held, memory_of
from worker.engine.comparisons import check as check_comparison
from worker.engine.memory import Memory
from worker.engine.plan import AdapterLoad
from worker.engine.refusal import adapter_too_large
from worker.engine.request import Request
from worker.engine.residency import Placement
from worker.mailbox import AdapterFile, Compare, Sampling, Submit


def file(digest: str, size: int, outside: int = 0, vocabulary: int = 0) -> AdapterFile:
    return AdapterFile(digest, f"/cache/{digest}", size, outside, vocabulary)


def place(memory: Memory, wanted: AdapterFile) -> Placement | None:
    submit = Submit(1, (1,), Sampling(), wanted, "default", 0.0)
    request = Request.from_submit(submit, sequence=1, max_known_tokens=9, chain_start=b"", adapter_on_device=False)
    return memory.place(wanted, request, (), reserve=0, now=0.0)


def load(memory: Memory, wanted: AdapterFile) -> None:
    placement = place(memory, wanted)
    assert placement is not None
    memory.loaded(placement.slot, AdapterLoad(10, 1), 1.0)


def test_chunks_are_granted_for_what_goes_into_the_arena() -> None:
    placement = place(memory_of(), file("a", 1020, outside=1000, vocabulary=2000))
    assert placement is not None
    assert len(placement.chunk_ids) == 3


def test_idle_adapters_with_such_parts_leave_for_another_s_and_no_others() -> None:
    memory = memory_of(max_vocabulary_bytes=100)
    load(memory, file("plain", 10))
    load(memory, file("a", 60, 50, 50))
    load(memory, file("b", 60, 50, 50))
    load(memory, file("c", 60, 50, 40))
    assert held(memory) == {"plain", "b", "c"}
    assert memory.residency.vocabulary_bytes == 90
    load(memory, file("another", 10))
    assert held(memory) == {"plain", "b", "c", "another"}


def test_one_waits_where_those_in_use_leave_no_room() -> None:
    memory = memory_of(max_vocabulary_bytes=100)
    load(memory, file("a", 60, 50, 60))
    slot = memory.acquire("a")
    assert place(memory, file("b", 60, 50, 50)) is None
    memory.release(slot)
    placement = place(memory, file("b", 60, 50, 50))
    assert placement is not None
    memory.failed(placement.slot)
    assert memory.residency.vocabulary_bytes == 0


@pytest.mark.parametrize(
    ("wanted", "option"),
    [
        (file("a", 1000, 990, 100), None),
        (file("a", 1000, 990, 101), "max_vocabulary_bytes"),
        (file("a", 1000, 600, 100), "arena_bytes"),
        (file("a", 2001, 1995, 100), "max_adapter_bytes"),
    ],
)
def test_what_never_fits_is_refused_by_the_setting_that_would_help(wanted: AdapterFile, option: str | None) -> None:
    limits: dict[str, Any] = {"chunk_bytes": 10, "adapter_chunk_bytes": 10, "total_blocks": 32}
    config = replace(CONFIG, **limits, max_vocabulary_bytes=100, max_adapter_bytes=2000)
    problem = adapter_too_large(wanted, config)
    if option is None:
        assert problem is None
    else:
        assert problem is not None
        assert problem.reason == "TOO_LARGE"
        assert problem.message.endswith(f"raise {option}")


def test_both_artifacts_of_a_comparison_must_fit_together() -> None:
    compare = Compare(1, (1, 2, 3), 1, file("e", 60, 50, 60), file("m", 60, 50, 60), "t")
    for limit, refused in ((119, True), (120, False)):
        problem = check_comparison(compare, replace(CONFIG, max_vocabulary_bytes=limit))
        assert (problem is not None and "max_vocabulary_bytes" in problem.message) == refused


def test_a_request_waits_for_another_s_parts_to_leave(tmp_path: Any) -> None:
    driver = Driver(tmp_path, max_vocabulary_bytes=100)

    def asked(name: str) -> int:
        known = driver.file(name)
        return driver.submit(
            adapter=AdapterFile(name, known.path, known.artifact_bytes, outside_bytes=0, vocabulary_bytes=80)
        )

    first, second = asked("a"), asked("b")
    driver.run_until_idle()
    assert {first, second} <= driver.finished.keys()
    assert driver.started_loads == ["a", "b"]


ROOM: dict[str, Any] = {"max_resident_adapters": 4, "total_blocks": 24, "chunk_bytes": 16, "adapter_chunk_bytes": 10}


def test_pins_leave_room_beside_the_arena_too(tmp_path: Path) -> None:
    driver = Driver(tmp_path, max_vocabulary_bytes=100, **ROOM)
    first, second = driver.pin("a", 1000, 990, 40), driver.pin("b", 1000, 990, 40)
    assert first in driver.steered  # its file would not fit the arena, which it does not go into
    assert "raise max_vocabulary_bytes" in driver.failed[second].message

    beside = driver.submit(max_tokens=40)
    fits, too_large = (
        driver.submit(adapter=driver.file(name, 1000, 990, size)) for name, size in (("c", 60), ("d", 61))
    )
    assert driver.failed[too_large].reason == "DEVICE_FULL"
    assert "beside those pinned; raise max_vocabulary_bytes" in driver.failed[too_large].message
    driver.run_until_idle()
    assert {fits, beside} <= driver.finished.keys()


def test_a_pin_leaves_what_is_here_its_room_beside_the_arena(tmp_path: Path) -> None:
    driver = Driver(tmp_path, max_vocabulary_bytes=100, **ROOM)
    driver.submit(adapter=driver.file("large", 1000, 990, 70))
    assert "raise max_vocabulary_bytes" in driver.failed[driver.pin("a", 1000, 990, 40)].message
    assert driver.pin("plain", 10) in driver.steered
