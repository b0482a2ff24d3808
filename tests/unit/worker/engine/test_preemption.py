"""When memory runs out: who gives way, that all get on, and that nothing but time shows it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fake_runner import expected_tokens
from tests.unit.worker.engine.driver import Driver
from worker.engine.plan import NewRequest

Drive = Callable[..., Driver]


def running_ids(driver: Driver) -> set[int]:
    return set(driver.scheduler._running)


def num_preempted(driver: Driver) -> int:
    return driver.scheduler.status().num_preempted


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preempted_requests_answer_as_if_they_had_been_alone(drive: Drive, prefix_cache: bool) -> None:
    driver = drive(total_blocks=10, prefix_cache=prefix_cache)
    ids = [driver.submit(prompt=4, max_tokens=20, adapter=a) for a in (None, "a", "a", None)]
    driver.run_until_idle()
    assert num_preempted(driver) > 0
    for request_id in ids:
        file = driver.adapters[request_id]
        adapter = b"" if file is None else file.artifact_digest.encode()
        assert driver.tokens[request_id] == expected_tokens(driver.prompts[request_id], 20, adapter=adapter)


def test_the_youngest_gives_way_and_comes_back_with_its_tokens(drive: Drive) -> None:
    driver = drive(total_blocks=5, prefix_cache=False)
    driver.runner.keep_plans = True
    old, young = driver.submit(prompt=7, max_tokens=8), driver.submit(prompt=7, max_tokens=8)
    while not num_preempted(driver):
        driver.step()
    assert running_ids(driver) == {old}
    so_far = tuple(driver.tokens[young])
    assert so_far
    driver.run_until_idle()
    announced = [new for plan in driver.runner.plans for new in plan.new_requests if new.request_id == young]
    assert [(new.prompt_token_ids, new.generated_token_ids) for new in announced] == [
        (driver.prompts[young], ()),
        (driver.prompts[young], so_far),
    ]
    assert isinstance(announced[1], NewRequest)
    assert driver.tokens[young] == expected_tokens(driver.prompts[young], 8)
    assert old in driver.finished


def test_the_first_tokens_are_told_once_and_times_go_on(drive: Drive) -> None:
    driver = drive(total_blocks=5, prefix_cache=False)
    driver.submit(prompt=7, max_tokens=8)
    young = driver.submit(prompt=7, max_tokens=8)
    driver.now += 0.5
    driver.run_until_idle()
    assert num_preempted(driver) == 1
    timing = driver.finished[young].timing
    assert timing is not None
    assert timing.queue_s == 0.5
    assert timing.decode_s > 0.1  # its time without memory is in the middle of its answer


def test_the_tenant_that_has_had_most_gives_way_but_never_the_oldest(drive: Drive) -> None:
    driver = drive(total_blocks=12, max_prefill_tokens=64, prefix_cache=False)
    oldest = driver.submit(prompt=11, max_tokens=30, tenant="greedy")
    young = driver.submit(prompt=11, max_tokens=9, tenant="greedy")
    modest = driver.submit(prompt=3, max_tokens=30, tenant="modest")
    while not num_preempted(driver):
        driver.step()
    assert running_ids(driver) == {oldest, modest}
    assert driver.is_live(young)
    driver.run_until_idle()


def test_a_request_pauses_rather_than_take_from_one_above_it(drive: Drive) -> None:
    driver = drive(total_blocks=7, max_prefill_tokens=64, prefix_cache=False)
    first, second = driver.submit(prompt=11, max_tokens=15), driver.submit(prompt=7, max_tokens=4)
    plans = [driver.step() for _ in range(9)]
    assert all(plan is not None and first in {s.request_id for s in plan.sequences} for plan in plans)
    assert num_preempted(driver) == 0
    driver.run_until_idle()
    assert second in driver.finished


def test_all_get_on_when_everybody_wants_all_memory(drive: Drive) -> None:
    driver = drive(total_blocks=16, max_running_requests=8, kv_watermark=0.0)
    ids = [driver.submit(prompt=3, max_tokens=59) for _ in range(8)]  # each can fill the arena
    turns = driver.run_until_idle(max_steps=1000)
    assert set(ids) == set(driver.finished)
    assert turns < 8 * 64
    assert driver.scheduler.status().free_blocks == 16


def test_a_preempted_request_keeps_its_adapter_s_place_in_no_way(drive: Drive) -> None:
    """Its reference is gone, so its adapter may leave; it is loaded again before the request goes on."""
    driver = drive(total_blocks=9, chunk_bytes=10, adapter_chunk_bytes=10, adapter_floor=0.0, prefix_cache=False)
    old = driver.submit(prompt=7, max_tokens=29)  # 9 blocks in the end: all
    driver.step()
    young = driver.submit(prompt=3, max_tokens=25, adapter="a")
    driver.run_until_idle()
    assert num_preempted(driver) >= 1
    assert driver.started_loads == ["a", "a"]
    assert driver.tokens[young] == expected_tokens(driver.prompts[young], 25, adapter=b"a")
    assert driver.tokens[old] == expected_tokens(driver.prompts[old], 29)


def test_the_oldest_takes_even_what_adapters_keep_against_others(drive: Drive) -> None:
    driver = drive(total_blocks=8, chunk_bytes=10, adapter_chunk_bytes=10, adapter_floor=0.5)
    driver.submit(adapter=driver.file("a", 20), max_tokens=1)
    driver.run_until_idle()
    assert driver.scheduler.status().adapter_chunks == 1
    driver.submit(prompt=7, max_tokens=26)  # 8 blocks in the end
    driver.run_until_idle()
    assert driver.scheduler.status().adapter_chunks == 0


def test_idle_adapters_keep_their_floor_against_younger_requests(drive: Drive) -> None:
    driver = drive(
        total_blocks=8, chunk_bytes=10, adapter_chunk_bytes=10, adapter_floor=0.25, prefix_cache=False, block_tokens=4
    )
    driver.submit(adapter="a", max_tokens=1)
    driver.submit(adapter="b", max_tokens=1)
    driver.run_until_idle()
    assert driver.scheduler.status().adapter_chunks == 2
    driver.submit(prompt=11, max_tokens=5)  # 4 blocks in the end
    young = driver.submit(prompt=7, max_tokens=5)  # 3 in the end, 2 are left
    for _ in range(3):
        driver.step()
    assert driver.is_live(young)
    assert driver.scheduler.status().adapter_chunks == 2
    driver.run_until_idle()


def test_what_is_aborted_while_a_step_runs_is_freed_after_it(drive: Drive) -> None:
    driver = drive(max_resident_adapters=1)
    gone = driver.submit(adapter="a", max_tokens=9)
    stays = driver.submit(max_tokens=9)
    driver.step()
    driver.finish_loads()
    driver.step()
    plan = driver.scheduler.schedule(driver.now).plan
    assert plan is not None
    held = driver.scheduler.status().kv_blocks
    driver.abort(gone)
    status = driver.scheduler.status()
    assert (status.kv_blocks, driver.told()["a"].in_flight, status.running_requests) == (held, 1, 1)
    outputs = driver.scheduler.update(plan, driver.runner.execute(plan), 0.01, driver.now)
    assert [output.request_id for output in outputs] == [stays]
    status = driver.scheduler.status()
    assert (status.kv_blocks, driver.told()["a"].in_flight) == (held - 1, 0)
    following = driver.step()
    assert following is not None
    assert following.ended_request_ids == (gone,)


def test_what_is_aborted_while_a_step_runs_that_fails_is_freed_too(drive: Drive) -> None:
    driver = drive()
    gone, other = driver.submit(max_tokens=9), driver.submit(max_tokens=9)
    plan = driver.scheduler.schedule(driver.now).plan
    assert plan is not None
    driver.abort(gone)
    failures = driver.scheduler.fail_step(plan, ("INTERNAL", "", {}))  # type: ignore[arg-type]
    assert [failure.request_id for failure in failures] == [other]
    assert driver.scheduler.status().kv_blocks == 0
