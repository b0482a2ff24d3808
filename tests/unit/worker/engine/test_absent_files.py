"""Requests whose adapter's file has left the disk: served by what the engine has, else in nobody's way."""

from __future__ import annotations

from collections.abc import Callable

from tests.fake_runner import expected_tokens
from tests.unit.worker.engine.driver import LOAD_FAILURE, Driver
from worker.engine.plan import HostChanges

Drive = Callable[..., Driver]


def resident(driver: Driver, *names: str) -> None:
    """Have adapters on the device, and nothing else."""
    for name in names:
        driver.submit(3, 1, name)
    driver.run_until_idle()
    driver.started_loads.clear()


def check_tokens(driver: Driver, request_id: int, adapter: str) -> None:
    count = len(driver.tokens[request_id])
    expected = expected_tokens(driver.prompts[request_id], count, adapter=adapter.encode())
    assert (driver.tokens[request_id], request_id in driver.finished) == (expected, True)


def test_an_adapter_on_the_device_needs_no_file(drive: Drive) -> None:
    driver = drive()
    resident(driver, "a")
    request = driver.submit(3, 4, "a", absent=True)
    driver.step()
    driver.run_until_idle()
    check_tokens(driver, request, "a")
    assert (driver.wanted, driver.started_loads) == ([], [])
    timing = driver.finished[request].timing
    assert timing is not None
    assert timing.adapter_on_device


def test_one_that_left_before_its_request_began_is_asked_for_once_and_loaded_when_the_file_is_there(
    drive: Drive,
) -> None:
    driver = drive()
    request, sibling = (driver.submit(3, 4, "a", absent=True) for _ in range(2))
    for _ in range(3):
        driver.step()
    assert driver.wanted == [request, sibling]
    assert (driver.scheduler.status().waiting_requests, driver.scheduler.status().queued_prefill_tokens) == (2, 6)
    driver.provide(request)
    driver.step()
    assert driver.started_loads == ["a"]
    driver.provide()
    driver.run_until_idle()
    assert driver.started_loads == ["a"]
    for each in (request, sibling):
        check_tokens(driver, each, "a")
        timing = driver.finished[each].timing
        assert timing is not None
        assert not timing.adapter_on_device


def test_who_waits_for_a_file_holds_up_nobody_however_long(drive: Drive) -> None:
    driver = drive(max_resident_adapters=1, max_adapter_wait_s=1.0)
    parked = [driver.submit(3, 1, "gone", absent=True) for _ in range(200)]
    other, base = driver.submit(3, 2, "b"), driver.submit(3, 2)
    for _ in range(10):
        driver.step(seconds=3.0)
        driver.finish_loads()
    assert {other, base} <= driver.finished.keys()
    assert driver.wanted == parked
    assert not driver.failed
    driver.compare((1, 2, 3), driver.file("b"), driver.file("b"))
    driver.step()
    driver.step()
    assert len(driver.compared) == 1  # nobody waits whom the engine could serve
    driver.abort(*parked)
    assert driver.scheduler.status().waiting_requests == driver.scheduler.status().queued_prefill_tokens == 0


def test_who_was_overtaken_does_not_age_while_it_waits_for_a_file(drive: Drive) -> None:
    driver = drive(max_resident_adapters=1, max_adapter_wait_s=2.0)
    driver.scheduler.host_changed(HostChanges(1, came=("a",)))
    driver.submit(3, 40, "b")
    driver.step()
    driver.finish_loads()
    late = driver.submit(3, 1, "a", absent=True)
    driver.submit(3, 1)  # overtakes it, as there is no slot for a
    driver.step()
    driver.scheduler.host_changed(HostChanges(0, gone=("a",)))
    driver.step(seconds=10.0)
    assert driver.wanted == [late]
    driver.provide()
    after = driver.submit(3, 1)
    driver.step()
    driver.step()
    assert after in driver.finished
    driver.run_until_idle()
    check_tokens(driver, late, "a")


def test_a_preempted_request_whose_adapter_has_left_meanwhile_goes_on_when_the_file_is_there(drive: Drive) -> None:
    # 9 chunks: an adapter has 2, an answer grows to 6. So one of both has to stop, and its adapter to go.
    names = "a" * 32, "b" * 32
    driver = drive(total_blocks=9, chunk_bytes=16, adapter_chunk_bytes=16, kv_watermark=0.0, adapter_floor=0.0)
    resident(driver, *names)
    requests = {driver.submit(3, 22, name, absent=True): name for name in names}
    for _ in range(60):
        if not driver.wanted:
            driver.step()
    (preempted,) = driver.wanted
    assert driver.tokens[preempted]  # it had begun
    driver.run_until_idle()
    assert driver.started_loads == [requests[preempted]]
    for request, name in requests.items():
        check_tokens(driver, request, name)
        timing = driver.finished[request].timing
        assert timing is not None
        assert timing.adapter_on_device  # when the request came


def test_a_copy_in_host_memory_stands_in_for_the_file_until_it_leaves(drive: Drive) -> None:
    driver = drive(max_resident_adapters=1)
    driver.scheduler.host_changed(HostChanges(1, came=("a",)))
    first = driver.submit(3, 2, "a", absent=True)
    driver.run_until_idle()
    check_tokens(driver, first, "a")
    assert driver.started_loads == ["a"]
    resident(driver, "b")  # and a is not any more
    second = driver.submit(3, 2, "a", absent=True)
    driver.step()
    assert (driver.started_loads, driver.wanted) == (["a"], [])
    driver.scheduler.host_changed(HostChanges(0, gone=("a",)))  # before a thread has begun the load
    driver.fail_load(next(iter(driver.loading)))
    driver.step()
    assert (driver.failed, driver.wanted) == ({}, [second])
    driver.run_until_idle()
    check_tokens(driver, second, "a")


def test_a_failed_load_of_a_copy_is_told_of_nobody(drive: Drive) -> None:
    driver = drive()
    driver.scheduler.host_changed(HostChanges(1, came=("a",)))
    driver.submit(3, 2, "a", absent=True)
    driver.step()
    (slot,) = driver.loading
    assert driver.scheduler.adapter_failed(slot, LOAD_FAILURE) == (None, [])
