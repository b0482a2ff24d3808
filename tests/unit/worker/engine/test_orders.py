"""Orders for adapters without a request: loads behind requests, unloads of what nobody needs, pins within bounds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.worker.engine.driver import Driver, on_device
from worker.mailbox import Steered, Urgency

Drive = Callable[..., Driver]


def resident(driver: Driver) -> set[str]:
    return {digest for digest, held in on_device(driver.scheduler._memory.residency).items() if not held.loading}


def bring(driver: Driver, *names: str) -> None:
    for name in names:
        driver.load(name)
        driver.step()
        driver.finish_loads()
    assert set(names) <= resident(driver)


def test_a_load_brings_an_adapter_without_a_request_and_is_told_once_it_is_there(drive: Drive) -> None:
    driver = drive()
    order = driver.load("a")
    driver.step()
    assert order not in driver.steered
    driver.finish_loads()
    assert driver.steered[order] == Steered(order, was_on_device=False)
    again = driver.load("a")
    assert driver.steered[again] == Steered(again, was_on_device=True)
    assert driver.started_loads == ["a"]
    request = driver.submit(adapter="a")
    driver.run_until_idle()
    timing = driver.finished[request].timing
    assert timing is not None
    assert timing.adapter_on_device


def test_loads_of_one_adapter_join_and_fail_together(drive: Drive) -> None:
    driver = drive()
    orders = [driver.load("a"), driver.load("a", Urgency.AHEAD)]
    request = driver.submit(adapter="a")
    driver.step()
    assert driver.started_loads == ["a"]
    driver.fail_load(0)
    assert {driver.failed[each].reason for each in (*orders, request)} == {"CORRUPT_ARTIFACT"}


def test_loads_go_behind_requests_and_by_urgency(drive: Drive) -> None:
    driver = drive(max_resident_adapters=3)
    ahead, refused, pinned, asked = (
        driver.load(name, urgency) for name, urgency in zip("wxyz", reversed(Urgency), strict=True)
    )
    driver.submit(adapter="r")
    driver.step()
    assert driver.started_loads == ["r", "z", "y"]
    for order in (ahead, refused):
        assert driver.failed[order].reason == "DEVICE_FULL"  # no slot is left, and nobody is in a hurry
    driver.finish_loads()
    assert driver.steered.keys() == {pinned, asked}


def test_a_load_takes_nothing_that_a_waiting_request_needs(drive: Drive) -> None:
    driver = drive(max_resident_adapters=2, max_running_requests=1)
    bring(driver, "a", "b")
    running = driver.submit(adapter="a", max_tokens=20)
    waiting = driver.submit(adapter="b")  # resident and idle: it waits for a place in the batch
    driver.step()
    driver.step()
    order = driver.load("c")
    ahead = driver.load("d", Urgency.AHEAD)
    driver.step()
    assert driver.started_loads == ["a", "b"]
    assert ahead in driver.failed
    driver.run_until_idle()
    assert {running, waiting} <= driver.finished.keys()
    assert order in driver.steered


def serve(driver: Driver, *names: str) -> None:
    for name in names:
        driver.submit(adapter=name)
        driver.run_until_idle()


def test_a_load_ahead_takes_the_place_of_no_adapter_that_was_used_of_late(drive: Drive) -> None:
    driver = drive(max_resident_adapters=2)
    serve(driver, "a", "b")
    ahead = driver.load("c", Urgency.AHEAD)
    driver.run_until_idle()
    assert driver.failed[ahead].reason == "DEVICE_FULL"
    assert resident(driver) == {"a", "b"}
    refused = driver.load("c", Urgency.REFUSED)  # a request wanted it
    driver.run_until_idle()
    assert refused in driver.steered
    assert resident(driver) == {"b", "c"}


def test_a_load_ahead_takes_the_place_of_what_requests_would_displace_next_but_of_no_other(drive: Drive) -> None:
    driver = drive(max_resident_adapters=3)
    serve(driver, "a", "b", "c", "d")  # d has pushed out a, and b and c are worth no more than that was
    orders = [driver.load(name, Urgency.AHEAD) for name in "xyz"]
    driver.run_until_idle()
    assert resident(driver) == {"d", "x", "y"}  # z may push out neither its like nor d
    assert [order in driver.steered for order in orders] == [True, True, False]
    serve(driver, "d", "d", "b")
    assert resident(driver) == {"b", "d", "y"}


def test_a_load_ahead_takes_no_chunks_of_adapters_that_were_used_of_late(drive: Drive) -> None:
    # 32 chunks, of which three adapters take 27
    driver = drive(max_resident_adapters=9, chunk_bytes=16, adapter_chunk_bytes=16, prefix_cache=False)
    a, b, c, d = (name * 16 * 9 for name in "abcd")
    serve(driver, a, b, c)
    ahead = driver.load(d, Urgency.AHEAD)
    driver.run_until_idle()
    assert ahead in driver.failed
    assert resident(driver) == {a, b, c}
    driver.load(d, Urgency.REFUSED)
    driver.run_until_idle()
    assert resident(driver) == {b, c, d}


def test_an_idle_adapter_is_unloaded_at_once_and_one_that_is_not_there_is_no_error(drive: Drive) -> None:
    driver = drive()
    bring(driver, "a")
    order = driver.unload("a")
    assert driver.steered[order] == Steered(order, was_on_device=True)
    assert driver.told() == {}
    again = driver.unload("a")
    assert driver.steered[again] == Steered(again, was_on_device=False)
    driver.submit(adapter="a")
    driver.run_until_idle()
    assert driver.started_loads == ["a", "a"]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_adapter_that_a_request_needs_is_not_unloaded(drive: Drive, steps: int) -> None:
    driver = drive()
    bring(driver, "a")
    request = driver.submit(adapter="a", max_tokens=8)
    for _ in range(steps):
        driver.step()
    order = driver.unload("a")
    assert driver.failed[order].reason == "FAILED_PRECONDITION"
    driver.run_until_idle()
    assert request in driver.finished
    assert "a" in resident(driver)


def test_an_unload_during_a_load_that_has_begun_is_done_when_that_ends_and_nothing_comes_back(drive: Drive) -> None:
    driver = drive()
    request = driver.submit(adapter="a")
    driver.step()
    driver.begun.update(driver.loading)
    driver.abort(request)
    order = driver.unload("a")
    assert order not in driver.steered
    driver.finish_loads()
    assert driver.steered[order] == Steered(order, was_on_device=False)
    assert resident(driver) == set()
    driver.step()
    assert driver.runner.adapters == {}


def test_an_unload_during_a_load_that_has_not_begun_drops_it(drive: Drive) -> None:
    driver = drive()
    load = driver.load("a")
    driver.step()
    order = driver.unload("a")
    assert order in driver.steered
    assert driver.failed[load].message == "the adapter was unloaded before it was on the device"
    assert (driver.loading, driver.scheduler.status().adapter_chunks) == ({}, 0)


def test_a_request_that_comes_after_an_unload_that_is_not_done_keeps_the_adapter(drive: Drive) -> None:
    driver = drive()
    first = driver.submit(adapter="a")
    driver.step()
    driver.begun.update(driver.loading)
    driver.abort(first)
    order = driver.unload("a")
    second = driver.submit(adapter="a")
    driver.hear()
    assert driver.failed[order].reason == "FAILED_PRECONDITION"
    driver.run_until_idle()
    assert second in driver.finished
    assert "a" in resident(driver)
    assert driver.started_loads == ["a"]


def test_what_a_step_in_flight_still_uses_leaves_when_that_is_answered(drive: Drive) -> None:
    driver = drive(max_in_flight=2)
    bring(driver, "a")
    request = driver.submit(adapter="a", max_tokens=30)
    for _ in range(4):
        driver.step()
    assert driver.in_flight
    driver.abort(request)
    order = driver.unload("a")
    assert order not in driver.steered
    while driver.in_flight:
        driver.answer()
    driver.hear()
    assert order in driver.steered
    assert resident(driver) == set()


def test_a_load_that_nobody_wants_any_more_is_dropped_if_it_has_not_begun(drive: Drive) -> None:
    driver = drive()
    first, second = driver.submit(adapter="a"), driver.submit(adapter="a")
    driver.step()
    driver.abort(first)
    assert driver.loading
    driver.abort(second)
    assert (driver.loading, driver.scheduler.status().free_blocks) == ({}, 32)


def test_a_pinned_adapter_stays_whatever_comes_and_leaves_in_its_turn_once_unpinned(drive: Drive) -> None:
    driver = drive(max_resident_adapters=2)
    assert driver.pin("a") in driver.steered
    bring(driver, "a")
    for name in "bcbdc":
        driver.submit(adapter=name)
        driver.run_until_idle()
        assert resident(driver) == {"a", name}
    refused = driver.unload("a")
    assert "pinned" in driver.failed[refused].message
    driver.unpin("a")
    driver.submit(adapter="b")
    driver.submit(adapter="d")
    driver.run_until_idle()
    assert resident(driver) == {"b", "d"}


def test_a_pin_holds_from_the_moment_the_adapter_comes_even_if_that_is_later(drive: Drive) -> None:
    driver = drive(max_resident_adapters=2)
    assert driver.pin("a") in driver.steered
    for name in "abc":
        driver.submit(adapter=name)
        driver.run_until_idle()
    assert resident(driver) == {"a", "c"}


def test_pinned_chunks_are_counted_and_cannot_be_had(drive: Drive) -> None:
    driver = drive(chunk_bytes=16, adapter_chunk_bytes=16)
    file = driver.file("adapter of two chunks")
    driver.load(file)
    driver.step()
    driver.finish_loads()
    before = driver.scheduler.status()
    assert (before.adapter_chunks, before.pinned_chunks, before.free_blocks) == (2, 0, 32)
    driver.pin(file.artifact_digest, 21)
    after = driver.scheduler.status()
    assert (after.adapter_chunks, after.pinned_chunks, after.free_blocks) == (2, 2, 30)
    driver.unpin(file.artifact_digest)
    assert driver.scheduler.status() == before


def test_pins_leave_a_slot_for_others(drive: Drive) -> None:
    driver = drive(max_resident_adapters=3)
    driver.pin("a")
    driver.pin("b")
    driver.pin("b")  # again: nothing changes
    refused = driver.failed[driver.pin("c")]
    assert (refused.reason, refused.metadata["limit"]) == ("RESOURCE_EXHAUSTED", "2")
    assert "max_resident_adapters" in refused.message
    driver.unpin("a")
    assert driver.pin("c") in driver.steered


def test_pins_leave_chunks_for_the_longest_context_with_another_adapter(drive: Drive) -> None:
    # 32 chunks, of which a context of 64 tokens takes 16; adapters of 31 and 47 bytes are granted 3 and 4.
    driver = drive(max_resident_adapters=9, chunk_bytes=16, adapter_chunk_bytes=16)
    for name in "abcd":
        assert driver.pin(name, 31) in driver.steered
    refused = driver.failed[driver.pin("e", 31)]
    assert "arena_bytes" in refused.message
    driver.unpin("d")
    assert driver.pin("d", 47) not in driver.steered  # 3 * 3 + 4 pinned, and 16 + 4 for a request
    large = driver.submit(60, 4, driver.file("large", 47))
    driver.run_until_idle()
    assert large in driver.finished


def test_pins_leave_bytes_for_another_adapter(drive: Drive) -> None:
    driver = drive(max_resident_adapters=9, max_adapter_bytes=100)
    assert driver.pin("a", 50) in driver.steered
    assert "max_adapter_bytes" in driver.failed[driver.pin("b", 10)].message
    too_large = driver.submit(adapter=driver.file("c", 51))
    assert driver.failed[too_large].reason == "DEVICE_FULL"
    assert "beside those pinned" in driver.failed[too_large].message
    assert driver.failed[too_large].retry_after_s == 1.0
    never = driver.failed[driver.submit(adapter=driver.file("d", 101))]
    assert (never.reason, never.retry_after_s) == ("TOO_LARGE", None)
    assert "pinned" not in never.message
    assert driver.failed[driver.load(driver.file("c", 51))].reason == "DEVICE_FULL"
    assert driver.failed[driver.load(driver.file("d", 101))].reason == "TOO_LARGE"


def test_a_prompt_that_is_too_long_for_pins_alone_may_come_again(drive: Drive) -> None:
    # 32 chunks of 4 tokens; pins take 12 of them, an adapter of 144 bytes 10.
    driver = drive(max_resident_adapters=9, chunk_bytes=16, adapter_chunk_bytes=16)
    for name in "abcd":
        driver.pin(name, 31)
    large = driver.file("large", 144)
    fits = driver.submit(40, 1, large)
    refused = driver.failed[driver.submit(41, 1, large)]
    assert (refused.reason, refused.retry_after_s) == ("DEVICE_FULL", 1.0)
    assert refused.metadata == {"limit": "40", "length": "41"}
    assert driver.failed[driver.submit(64, 1, large)].reason == "PROMPT_TOO_LONG"
    driver.run_until_idle()
    assert fits in driver.finished


def test_a_pin_is_refused_that_would_leave_no_room_for_a_request_that_is_here(drive: Drive) -> None:
    driver = drive(max_resident_adapters=9, chunk_bytes=16, adapter_chunk_bytes=16)
    huge = driver.submit(30, 30, driver.file("huge", 16 * 12))  # 13 chunks beside 15 of KV
    driver.step()
    refused = driver.failed[driver.pin("a", 60)]
    assert refused.reason == "RESOURCE_EXHAUSTED"
    driver.run_until_idle()
    assert huge in driver.finished
    assert driver.pin("a", 60) in driver.steered


def test_a_request_that_pins_leave_no_room_for_after_all_is_refused_and_blocks_nobody(drive: Drive) -> None:
    driver = drive(max_resident_adapters=3, max_adapter_bytes=40)
    driver.pin("a", 10)
    bring(driver, "a")
    driver.scheduler._memory.residency.slot(0).device_bytes = 30  # more than its file has
    driver.scheduler._memory.residency._used_bytes = 30
    stuck, base = driver.submit(adapter=driver.file("b", 20)), driver.submit()
    driver.run_until_idle()
    assert "pinned" in driver.failed[stuck].message
    assert (driver.failed[stuck].reason, driver.failed[stuck].retry_after_s) == ("DEVICE_FULL", 1.0)
    assert base in driver.finished


def test_unpinning_ends_the_load_that_was_for_the_pin(drive: Drive) -> None:
    driver = drive()
    driver.pin("a")
    order = driver.load("a", Urgency.PINNED)
    driver.step()
    driver.unpin("a")
    assert driver.failed[order].reason == "FAILED_PRECONDITION"
    assert driver.loading == {}


def test_a_request_hurries_the_load_that_was_ordered_ahead_of_it(drive: Drive) -> None:
    driver = drive()
    driver.load("a", Urgency.AHEAD)
    driver.step()
    driver.submit(adapter="a")
    driver.step()
    assert driver.hurried == [0]
    driver.run_until_idle()


def test_an_adapter_that_comes_before_the_next_step_is_planned_saves_its_request_that_step(drive: Drive) -> None:
    driver = drive()
    driver.submit(max_tokens=30)
    driver.step()
    cold = driver.submit(adapter="a")
    driver.place_ahead()
    assert driver.started_loads == ["a"]
    driver.finish_loads()
    plan = driver.step()
    assert plan is not None
    assert cold in [sequence.request_id for sequence in plan.sequences]


def test_loads_begun_ahead_leave_what_requests_before_them_need(drive: Drive) -> None:
    # 12 chunks: the running request has 2, the resident adapter's waits for 7 of 28 tokens, the cold one needs 4.
    driver = drive(total_blocks=12, chunk_bytes=16, adapter_chunk_bytes=16, max_adapter_wait_s=100.0)
    bring(driver, "a")
    driver.submit(4, 3)
    driver.step()
    ready = driver.submit(28, 1, adapter="a")
    cold = driver.submit(2, 1, adapter=driver.file("cold", 47))
    driver.place_ahead()
    assert driver.started_loads == ["a"]
    driver.run_until_idle()
    assert driver.first_step[ready] < driver.first_step[cold]


def test_who_joins_a_load_is_told_the_time_of_its_own_wait(drive: Drive) -> None:
    driver = drive()
    first = driver.submit(adapter="a")
    driver.step(0.5)
    second = driver.submit(adapter="a")
    driver.now += 0.25
    driver.finish_loads()
    third = driver.submit(adapter="a")
    driver.run_until_idle()
    timings = [driver.finished[request].timing for request in (first, second, third)]
    waits = [(timing.adapter_on_device, timing.adapter_load_s) for timing in timings if timing is not None]
    assert waits == [(False, 0.75), (False, 0.25), (True, 0.0)]
