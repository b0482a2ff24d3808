"""Comparisons of two artifacts: what they get, when they run, and what they leave."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fake_runner import expected_comparison, expected_tokens
from tests.unit.worker.engine.driver import CONFIG, Driver, on_device
from worker.engine.comparisons import PATIENCE_S, check
from worker.engine.plan import AdapterLoad
from worker.mailbox import AdapterFile, Compare

Drive = Callable[..., Driver]
TOKENS = (5, 6, 7, 8, 9)


def comparing(driver: Driver, tokens: tuple[int, ...] = TOKENS, first: int = 2) -> int:
    return driver.compare(tokens, driver.file("exact"), driver.file("measured"), first)


def test_the_positions_asked_for_are_compared_under_both_artifacts(drive: Drive) -> None:
    driver = drive()
    asked = comparing(driver)
    driver.run_until_idle()
    expected = expected_comparison(TOKENS, 2, b"exact", b"measured")
    assert len(driver.compared[asked].kl) == 3
    assert (driver.compared[asked].same_top, driver.compared[asked].kl) == (expected.same_top, expected.kl)
    assert sorted(driver.started_loads) == ["exact", "measured"]


def test_an_artifact_is_compared_with_itself_in_one_slot(drive: Drive) -> None:
    driver = drive(max_resident_adapters=1)
    same = driver.file("exact")
    asked = driver.compare(TOKENS, same, same)
    driver.run_until_idle()
    assert driver.compared[asked].same_top == (True,) * 5
    assert driver.compared[asked].kl == (0.0,) * 5


def test_between_steps_a_comparison_holds_nothing(drive: Drive) -> None:
    driver = drive()
    comparing(driver)
    driver.step()
    driver.finish_loads()
    assert driver.scheduler.status().waiting_requests == 1
    plan = driver.step()
    assert plan is not None
    assert plan.comparison is not None
    status = driver.scheduler.status()
    assert (status.kv_blocks, status.prefix_blocks, status.waiting_requests) == (0, 0, 0)
    assert status.free_blocks == driver.config.total_blocks
    assert not any(adapter.in_flight for adapter in on_device(driver.scheduler._memory.residency).values())


def test_it_waits_while_a_request_does(drive: Drive) -> None:
    driver = drive(max_running_requests=1)
    ids = [driver.submit(max_tokens=3) for _ in range(2)]
    asked = comparing(driver)
    while ids[0] not in driver.finished:
        driver.step()
        driver.finish_loads()
    assert asked not in driver.compared
    driver.run_until_idle()
    assert asked in driver.compared


def test_it_takes_no_more_than_prompts_leave_of_a_step(drive: Drive) -> None:
    driver = drive(max_prefill_tokens=16, max_context_tokens=64)
    for name in ("exact", "measured"):
        driver.submit(adapter=name, max_tokens=1)
    driver.run_until_idle()
    driver.submit(prompt=30, max_tokens=8)  # 16, 14 and then an answer
    asked = comparing(driver)
    plans = [driver.step() for _ in range(3)]
    assert [plan is not None and plan.comparison is not None for plan in plans] == [False, False, True]
    assert asked in driver.compared


def test_one_that_is_larger_than_a_step_runs_where_nothing_else_does(drive: Drive) -> None:
    driver = drive(max_prefill_tokens=8)
    asked = comparing(driver)
    busy = driver.submit(max_tokens=12)
    while busy not in driver.finished:
        driver.step()
        driver.finish_loads()
        assert asked not in driver.compared
    driver.run_until_idle()
    assert asked in driver.compared


def test_one_that_is_larger_than_a_step_is_not_kept_waiting_for_ever(drive: Drive) -> None:
    driver = drive(max_prefill_tokens=8, max_context_tokens=200, total_blocks=100)
    first, second = comparing(driver), comparing(driver)
    busy = driver.submit(max_tokens=150)
    began_s = driver.now
    when: dict[int, float] = {}
    while busy not in driver.finished:
        driver.step(seconds=0.1)
        driver.finish_loads()
        when |= {asked: driver.now - began_s for asked in driver.compared if asked not in when}
    assert PATIENCE_S < when[first] < PATIENCE_S + 0.5
    assert 2 * PATIENCE_S < when[second] < 2 * PATIENCE_S + 1.0
    assert driver.tokens[busy] == expected_tokens(driver.prompts[busy], 150)


def test_one_does_not_inherit_how_long_another_has_waited(drive: Drive) -> None:
    driver = drive(max_prefill_tokens=8, max_context_tokens=200, total_blocks=100)
    gone = comparing(driver)
    driver.submit(max_tokens=150)
    for _ in range(5):
        driver.step(seconds=PATIENCE_S / 4)
    driver.abort(gone)
    asked = comparing(driver)
    for _ in range(3):
        driver.step(seconds=PATIENCE_S / 4)
        driver.finish_loads()
        assert asked not in driver.compared
    driver.run_until_idle()
    assert asked in driver.compared


def test_requests_beside_it_get_the_tokens_they_would_have_alone(drive: Drive) -> None:
    alone, beside = drive(), drive()
    for driver in (alone, beside):
        driver.submit(adapter="exact", max_tokens=12)
    for _ in range(4):
        comparing(beside)
    alone.run_until_idle()
    beside.run_until_idle()
    assert alone.tokens == beside.tokens
    assert len(beside.compared) == 4


def test_an_abort_before_or_during_its_step_frees_all_and_tells_nothing(drive: Drive) -> None:
    driver = drive()
    waiting, running = comparing(driver), comparing(driver)
    driver.abort(waiting)
    driver.step()
    driver.finish_loads()
    plan = driver.scheduler.schedule(driver.now).plan
    assert plan is not None
    assert plan.comparison is not None
    assert driver.scheduler.status().kv_blocks == 4
    driver.abort(running)
    driver.scheduler.update(plan, driver.runner.execute(plan), 0.01, driver.now)
    assert driver.scheduler.take_compared() == []
    status = driver.scheduler.status()
    assert (status.kv_blocks, status.waiting_requests) == (0, 0)
    assert not any(adapter.in_flight for adapter in on_device(driver.scheduler._memory.residency).values())


def test_a_step_that_raises_fails_it_and_frees_all(drive: Drive) -> None:
    driver = drive()
    asked = comparing(driver)
    driver.step()
    driver.finish_loads()
    driver.fail_next_step = True
    driver.step()
    assert driver.failed[asked].reason == "INTERNAL"
    assert driver.scheduler.status().free_blocks == driver.config.total_blocks


def test_an_adapter_that_cannot_be_loaded_fails_it(drive: Drive) -> None:
    driver = drive()
    asked = comparing(driver)
    driver.step()
    driver.fail_load(next(iter(driver.loading)))
    assert driver.failed[asked].reason == "CORRUPT_ARTIFACT"


def test_it_makes_no_room_among_what_requests_hold(drive: Drive) -> None:
    driver = drive(total_blocks=10, chunk_bytes=16, adapter_chunk_bytes=8, max_context_tokens=32)
    driver.submit(prompt=16, max_tokens=8)
    asked = comparing(driver)  # needs 2 chunks per adapter while it loads, and 4
    for _ in range(4):
        driver.step()
        driver.finish_loads()
    assert asked not in driver.compared
    driver.run_until_idle()
    assert asked in driver.compared
    assert driver.scheduler.status().num_preempted == 0


EXACT, MEASURED = AdapterFile("e", "e", 100), AdapterFile("m", "m", 30)


@pytest.mark.parametrize(
    ("change", "limits", "reason", "words"),
    [
        ({"token_ids": ()}, {}, "INVALID_PARAMETER", "cannot be compared"),
        ({"first_position": 5}, {}, "INVALID_PARAMETER", "cannot be compared"),
        ({"token_ids": (1,) * 65}, {}, "INVALID_PARAMETER", "at most 64 tokens"),
        ({"token_ids": (1, 2, 256)}, {}, "INVALID_PARAMETER", "0 to 255"),
        ({}, {"max_resident_adapters": 1}, "TOO_LARGE", "raise max_resident_adapters"),
        ({}, {"max_adapter_bytes": 99}, "TOO_LARGE", "raise max_adapter_bytes"),
        ({}, {"max_adapter_bytes": 129}, "TOO_LARGE", "both artifacts have 130 bytes"),
        ({}, {"chunk_bytes": 8, "adapter_chunk_bytes": 8, "total_blocks": 22}, "TOO_LARGE", "raise arena_bytes"),
    ],
)
def test_what_can_never_run_is_refused_with_the_remedy(
    drive: Drive, change: dict[str, object], limits: dict[str, int], reason: str, words: str
) -> None:
    fields: dict[str, object] = {"token_ids": TOKENS, "first_position": 2, **change}
    compare = Compare(1, exact=EXACT, measured=MEASURED, tenant="t", **fields)  # type: ignore[arg-type]
    config = drive(**limits).config
    problem = check(compare, config)
    assert problem is not None
    assert problem.reason == reason
    assert words in problem.message
    assert CONFIG.max_context_tokens == 64


def test_what_just_fits_runs(drive: Drive) -> None:
    exact, measured = b"e" * 100, b"m" * 30
    driver = drive(chunk_bytes=8, adapter_chunk_bytes=8, total_blocks=23, max_adapter_bytes=130)  # 14 + 5 + 2 x 2
    files = []
    for content in (exact, measured):
        (driver.folder / content.decode()).write_bytes(content)
        files.append(AdapterFile(content.decode(), str(driver.folder / content.decode()), len(content)))
    asked = driver.compare(TOKENS, files[0], files[1])
    driver.run_until_idle(max_steps=20)
    assert asked in driver.compared


def test_an_artifact_compared_with_itself_may_take_all_of_the_arena(drive: Drive) -> None:
    driver = drive(total_blocks=12, chunk_bytes=16, adapter_chunk_bytes=15, max_context_tokens=48)
    for name, size in (("b", 20), ("e", 40)):
        (driver.folder / name).write_bytes(name.encode() * size)
    driver.submit(adapter=driver.file("b", 20))  # idle then, with chunks that the comparison needs
    driver.run_until_idle()
    same = driver.file("e", 40)
    asked = driver.compare(tuple(range(1, 17)), same, same)  # 4 chunks for the adapter, and 4 for it each time
    driver.run_until_idle()
    assert asked in driver.compared


def test_one_that_the_device_has_no_room_for_is_refused_and_waits_for_nothing(drive: Drive) -> None:
    """Files may be a little smaller than what they take on the device, which is known once they have been there."""
    driver = drive(max_adapter_bytes=100)
    exact, measured = driver.file("exact", 50), driver.file("measured", 50)
    scheduler = driver.scheduler
    driver.submit(adapter=exact, max_tokens=1)
    (placement,) = scheduler.schedule(0.0).placements
    driver.runner.prepare_adapter(placement.slot, Path(placement.file.path), placement.chunk_ids)
    scheduler.adapter_loaded(placement.slot, AdapterLoad(51, 0), 0.1, 0.0)
    driver.run_until_idle()
    asked = driver.compare(TOKENS, exact, measured)
    driver.run_until_idle(max_steps=5)
    assert driver.failed[asked].reason == "TOO_LARGE"
    assert "max_adapter_bytes" in driver.failed[asked].message


def test_one_that_pins_leave_no_room_for_may_come_again(drive: Drive) -> None:
    driver = drive(max_adapter_bytes=100)
    driver.pin("pinned", 40)
    asked = driver.compare(TOKENS, driver.file("exact", 40), driver.file("measured", 40))
    driver.submit(adapter=driver.file("pinned", 40), max_tokens=1)
    driver.run_until_idle(max_steps=9)
    assert (driver.failed[asked].reason, driver.failed[asked].retry_after_s) == ("DEVICE_FULL", 1.0)
