"""Who starts when: memory, adapter slots, overtaking and its bound."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.worker.engine.driver import Driver
from worker.engine.plan import AdapterLoad

Drive = Callable[..., Driver]


def running(driver: Driver) -> int:
    return driver.scheduler.status().running_requests


def waiting(driver: Driver) -> int:
    return driver.scheduler.status().waiting_requests


def test_requests_wait_while_prompts_need_the_memory_and_start_when_it_is_free(drive: Drive) -> None:
    driver = drive(total_blocks=8)  # 4 tokens each: two prompts of 3 blocks and one more block for the first to grow
    ids = [driver.submit(prompt=12, max_tokens=14) for _ in range(3)]
    driver.step()
    assert (running(driver), waiting(driver)) == (2, 1)
    driver.abort(ids[0])
    driver.step()
    assert (running(driver), waiting(driver)) == (2, 0)
    driver.run_until_idle()


def test_answers_take_blocks_as_they_grow(drive: Drive) -> None:
    driver = drive(total_blocks=8)
    driver.submit(prompt=3, max_tokens=12)
    for blocks in [1, 1, 2, 2, 2, 2, 3]:
        driver.step()
        assert driver.scheduler.status().kv_blocks == blocks


def test_a_request_is_admitted_only_beside_what_running_prompts_still_need(drive: Drive) -> None:
    driver = drive(total_blocks=8, max_prefill_tokens=4)
    driver.submit(prompt=24, max_tokens=2)  # will need 6 blocks, has 1
    driver.step()
    late = driver.submit(prompt=8, max_tokens=2)
    driver.step()
    assert (running(driver), waiting(driver)) == (1, 1)
    driver.run_until_idle()
    assert late in driver.finished
    assert driver.scheduler.status().num_preempted == 0


def test_no_more_than_max_running_requests_run(drive: Drive) -> None:
    driver = drive(max_running_requests=3)
    for _ in range(7):
        driver.submit()
    driver.step()
    assert (running(driver), waiting(driver)) == (3, 4)


def test_one_load_per_adapter_however_many_ask(drive: Drive) -> None:
    driver = drive()
    for _ in range(5):
        driver.submit(adapter="a")
    driver.step()
    driver.submit(adapter="a")
    driver.step()
    assert driver.started_loads == ["a"]
    driver.finish_loads()
    driver.step()
    assert running(driver) == 6
    assert driver.runner.adapters == {0: b"a"}


def test_base_requests_need_no_slot(drive: Drive) -> None:
    driver = drive(max_resident_adapters=1)
    driver.submit(adapter="a", max_tokens=20)
    driver.submit(adapter="b")
    base = driver.submit()
    driver.step()
    assert base in driver.first_step


def test_a_resident_adapter_overtakes_one_that_loads_until_that_has_aged(drive: Drive) -> None:
    driver = drive(max_running_requests=4, max_adapter_wait_s=2.0)
    driver.submit(adapter="a", max_tokens=2)
    driver.run_until_idle()
    cold = driver.submit(adapter="b", max_tokens=2)
    early = driver.submit(adapter="a", max_tokens=2)
    driver.step()
    assert early in driver.first_step
    driver.now += 1.9
    in_time = driver.submit(adapter="a", max_tokens=2)
    driver.step()
    assert in_time in driver.first_step
    driver.now += 0.2
    late = [driver.submit(adapter="a", max_tokens=2), driver.submit(max_tokens=2)]
    driver.step()
    driver.step()
    assert not any(i in driver.first_step for i in late)
    driver.finish_loads()
    driver.step()
    assert cold in driver.first_step
    assert all(i in driver.first_step for i in late)


def test_waiting_alone_does_not_close_admission(drive: Drive) -> None:
    """Age counts from the first time that a request was overtaken, not from its arrival."""
    driver = drive()
    driver.submit(adapter="a", max_tokens=2)
    driver.step()
    driver.now += 60
    other = driver.submit(max_tokens=2)
    driver.step()
    assert other in driver.first_step


def test_a_large_request_is_overtaken_by_small_ones_only_until_it_has_aged(drive: Drive) -> None:
    driver = drive(total_blocks=8, max_adapter_wait_s=1.0)
    driver.submit(prompt=3, max_tokens=10)  # 3 blocks
    driver.step()
    large = driver.submit(prompt=30, max_tokens=3)  # all 8
    small = driver.submit(prompt=3, max_tokens=2)
    driver.step()
    assert small in driver.first_step
    driver.now += 1.0
    later = driver.submit(prompt=3, max_tokens=2)
    driver.step()
    assert later not in driver.first_step
    driver.run_until_idle()
    assert driver.first_step[large] < driver.first_step[later]


def test_a_stream_of_small_requests_does_not_starve_a_large_one(drive: Drive) -> None:
    driver = drive(total_blocks=8, max_adapter_wait_s=1.0)
    driver.submit(prompt=3, max_tokens=10)
    driver.step()
    large = driver.submit(prompt=30, max_tokens=3)
    for _ in range(200):
        driver.submit(prompt=3, max_tokens=6)
        driver.step(seconds=0.05)
        if large in driver.first_step:
            break
    assert large in driver.first_step


def test_a_stream_for_one_adapter_does_not_starve_another(drive: Drive) -> None:
    """A, B, A, A, A … on one slot: B must run."""
    driver = drive(max_resident_adapters=1, max_adapter_wait_s=1.0)
    driver.submit(adapter="a", max_tokens=8)
    driver.step()
    driver.finish_loads()
    driver.step()
    cold = driver.submit(adapter="b")
    for _ in range(200):
        driver.submit(adapter="a", max_tokens=8)
        driver.step(seconds=0.05)
        driver.finish_loads()
        if cold in driver.first_step:
            break
    assert cold in driver.first_step
    driver.run_until_idle()


def test_a_small_adapter_does_not_take_the_bytes_a_large_one_waits_for(drive: Drive) -> None:
    driver = drive(max_resident_adapters=8, max_adapter_bytes=10, max_running_requests=2)
    driver.submit(adapter=driver.file("a", 5), max_tokens=20)
    driver.step()
    driver.runner.prepare_adapter(0, driver.folder / "a", ())
    driver.scheduler.adapter_loaded(0, AdapterLoad(5, 0), 0.1, driver.now)
    driver.loading.clear()
    driver.step()
    driver.submit(adapter=driver.file("large", 8))
    driver.submit(adapter=driver.file("small", 5))
    driver.step()
    assert driver.started_loads == ["a"]


def test_an_adapter_in_flight_keeps_its_slot_and_the_next_waits_for_it(drive: Drive) -> None:
    driver = drive(max_resident_adapters=1)
    first = driver.submit(adapter="a", max_tokens=3)
    second = driver.submit(adapter="b", max_tokens=3)
    driver.step()
    driver.finish_loads()
    while driver.is_live(first):
        assert driver.started_loads == ["a"]
        driver.step()
    driver.step()
    assert driver.started_loads == ["a", "b"]
    driver.run_until_idle()
    assert driver.is_live(second) is False


def test_the_adapter_of_an_earlier_waiter_is_not_evicted_for_a_later_one(drive: Drive) -> None:
    driver = drive(max_resident_adapters=1, total_blocks=8)
    driver.submit(prompt=28, max_tokens=3)  # takes all memory but what it may grow by
    driver.submit(adapter="a")
    driver.step()
    driver.finish_loads()
    driver.submit(adapter="b")
    driver.step()
    assert driver.started_loads == ["a"]


def test_the_least_recently_used_idle_adapter_leaves(drive: Drive) -> None:
    driver = drive(max_resident_adapters=2)
    for name in ("a", "b", "a", "c", "a"):
        driver.submit(adapter=name)
        driver.run_until_idle()
    assert driver.started_loads == ["a", "b", "c"]
    assert sorted(driver.runner.adapters.values()) == [b"a", b"c"]


def test_loads_for_waiting_requests_start_while_the_batch_is_full(drive: Drive) -> None:
    driver = drive(max_running_requests=1)
    driver.submit(max_tokens=20)
    driver.submit(adapter="a")
    driver.step()
    assert driver.started_loads == ["a"]


def test_a_failed_load_fails_its_waiters_with_its_reason_and_frees_the_slot(drive: Drive) -> None:
    driver = drive(max_resident_adapters=1)
    bad = [driver.submit(adapter="a"), driver.submit(adapter="a")]
    other = driver.submit(adapter="b")
    driver.step()
    driver.fail_load(0)
    assert [(driver.failed[i].reason, driver.failed[i].metadata) for i in bad] == [
        ("CORRUPT_ARTIFACT", {"tensor": "x"})
    ] * 2
    driver.step()
    assert driver.started_loads == ["a", "b"]
    driver.run_until_idle()
    assert driver.finished[other].finish == "length"


def test_a_load_that_has_begun_without_waiters_left_stays_usable(drive: Drive) -> None:
    driver = drive(max_resident_adapters=1)
    driver.abort(driver.submit(adapter="a"))
    driver.step()
    assert driver.started_loads == []
    gone = driver.submit(adapter="a")
    driver.step()
    driver.begun.update(driver.loading)
    driver.abort(gone)
    driver.finish_loads()
    later = driver.submit(adapter="a")
    driver.step()
    assert later in driver.first_step
    assert driver.started_loads == ["a"]
    driver.run_until_idle()
    driver.submit(adapter="b")
    driver.run_until_idle()
    assert driver.started_loads == ["a", "b"]


def test_timing_takes_the_load_out_of_the_queue_time(drive: Drive) -> None:
    driver = drive()
    first = driver.submit(adapter="a", max_tokens=1)
    driver.step(seconds=0)
    driver.now += 0.5
    second = driver.submit(adapter="a", max_tokens=1)  # comes when the load is half done
    driver.now += 0.5
    driver.finish_loads()
    driver.now += 0.25
    driver.step()
    third = driver.submit(adapter="a", max_tokens=1)
    driver.step()
    timings = [driver.finished[i].timing for i in (first, second, third)]
    assert [(t.queue_s, t.adapter_load_s, t.adapter_on_device) for t in timings if t] == [
        (0.25, 1.0, False),
        (0.25, 0.5, False),
        (0.0, 0.0, True),
    ]


def test_status_tells_the_adapters(drive: Drive) -> None:
    driver = drive()
    driver.submit(adapter="a")
    driver.submit(adapter=driver.file("bb", 100))
    driver.step()
    driver.finish_load(0)
    driver.step()
    told = {digest: (a.loading, a.in_flight, a.device_bytes) for digest, a in driver.told().items()}
    assert told == {"a": (False, 1, 1), "bb": (True, 0, 100)}


def test_an_aged_waiter_goes_first_and_nobody_gets_a_slot_before_it(drive: Drive) -> None:
    driver = drive(max_resident_adapters=1, max_adapter_wait_s=1.0)
    driver.submit(adapter="a", max_tokens=12)
    driver.step()
    driver.finish_loads()
    driver.step()
    first = driver.submit(adapter="b", max_tokens=2)
    driver.submit(adapter="a", max_tokens=2)
    driver.step()  # overtakes b
    driver.now += 1.0
    driver.submit(adapter="c", max_tokens=2, tenant="new")  # has had nothing: it would stand before b
    while driver.started_loads == ["a"]:
        driver.step()
    assert driver.started_loads == ["a", "b"]
    driver.run_until_idle()
    assert first in driver.finished


def test_adapters_share_the_arena_with_kv_blocks(drive: Drive) -> None:
    driver = drive(total_blocks=8, chunk_bytes=10, adapter_chunk_bytes=10, adapter_floor=0.0)
    driver.submit(adapter=driver.file("a", 30), max_tokens=2)  # 4 chunks are granted, its one byte needs 1
    driver.step()
    assert driver.scheduler.status().adapter_chunks == 4
    driver.finish_loads()
    assert driver.scheduler.status().adapter_chunks == 1
    driver.run_until_idle()
    assert driver.scheduler.status().free_blocks == 8
    driver.submit(prompt=30, max_tokens=2)  # all 8
    driver.run_until_idle()
    assert driver.scheduler.status().adapter_chunks == 0
    assert driver.runner.adapters == {}


def test_an_adapter_waits_for_chunks_that_running_requests_hold(drive: Drive) -> None:
    driver = drive(total_blocks=8, chunk_bytes=10, adapter_chunk_bytes=10)
    driver.submit(prompt=20, max_tokens=4)
    driver.step()
    cold = driver.submit(adapter=driver.file("a", 20))  # 3 chunks, 2 can be had beside the running one's next
    driver.step()
    assert driver.started_loads == []
    driver.run_until_idle()
    assert cold in driver.finished


@pytest.mark.parametrize(
    ("bytes_", "prompt", "reason"), [(61, 3, "TOO_LARGE"), (60, 5, "PROMPT_TOO_LONG"), (60, 4, None), (50, 5, None)]
)
def test_an_adapter_and_a_prompt_must_fit_the_arena_together(
    drive: Drive, bytes_: int, prompt: int, reason: str | None
) -> None:
    driver = drive(total_blocks=8, chunk_bytes=10, adapter_chunk_bytes=10)
    asked = driver.submit(prompt=prompt, max_tokens=60, adapter=driver.file("a", bytes_))
    if reason is None:
        driver.run_until_idle()
        capacity = (8 - bytes_ // 10 - 1) * 4
        assert len(driver.tokens[asked]) == capacity + 1 - prompt  # the answer ends with the context that is left
    else:
        assert driver.failed[asked].reason == reason


def test_batches_of_several_adapters_are_bounded_by_the_mixed_batch_ratio(drive: Drive) -> None:
    driver = drive(max_running_requests=8, mixed_batch_ratio=0.5, max_prefill_tokens=64)
    for _ in range(5):
        driver.submit(adapter="a", max_tokens=9)
    driver.step()
    driver.finish_loads()
    driver.step()
    other = driver.submit(adapter="b", max_tokens=3)
    driver.step()
    driver.finish_loads()
    for _ in range(9):
        driver.submit(adapter="a", max_tokens=3)
    driver.step()
    assert running(driver) == 8  # of one adapter, all may run
    assert other not in driver.first_step
    while driver.live:
        driver.step(seconds=0.5)
        used = {r.adapter.artifact_digest for r in driver.scheduler._running.values() if r.adapter is not None}
        assert running(driver) <= (4 if len(used) > 1 else 8)
    assert other in driver.finished


def test_an_adapter_is_used_before_the_next_tenant_s_pushes_it_out(drive: Drive) -> None:
    """A load is charged, so the other tenant comes first as soon as it is done; both would load for ever."""
    driver = drive(max_resident_adapters=1)
    ids = [driver.submit(adapter="a", tenant="t"), driver.submit(adapter="b", tenant="u")]
    driver.run_until_idle(max_steps=50)
    assert driver.started_loads == ["a", "b"]
    assert set(ids) == set(driver.finished)
