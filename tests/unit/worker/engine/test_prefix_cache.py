"""Computed blocks that later requests begin with: what is found, for whom, what it changes, and when it leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.fake_runner import expected_tokens
from tests.unit.worker.engine.driver import Driver
from worker.engine.prefix import chain_start, next_key

Drive = Callable[..., Driver]
PROMPT = tuple(range(1, 15))  # 3 blocks of 4 and 2 tokens


def cached_tokens(driver: Driver, request_id: int) -> int:
    timing = driver.finished[request_id].timing
    assert timing is not None
    return timing.cached_tokens


def run(driver: Driver, prompt: tuple[int, ...] = PROMPT, **request: Any) -> int:
    request_id = driver.submit(prompt, **request)
    driver.run_until_idle()
    return request_id


def test_a_second_request_computes_only_what_is_new_and_answers_the_same(drive: Drive) -> None:
    driver = drive()
    first = run(driver, max_tokens=6)
    second = driver.submit(PROMPT, max_tokens=6)
    plan = driver.step()
    assert plan is not None
    (sequence,) = plan.sequences
    assert (sequence.position, sequence.token_ids, sequence.sample) == (12, (13, 14), True)
    driver.run_until_idle()
    assert (cached_tokens(driver, first), cached_tokens(driver, second)) == (0, 12)
    assert driver.tokens[first] == driver.tokens[second] == expected_tokens(PROMPT, 6)
    assert driver.scheduler.status().num_cached_tokens == 12


@pytest.mark.parametrize(("length", "cached"), [(4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (14, 12)])
def test_the_last_token_of_a_prompt_is_always_computed(drive: Drive, length: int, cached: int) -> None:
    driver = drive()
    run(driver)
    again = run(driver, PROMPT[:length])
    assert cached_tokens(driver, again) == cached
    assert driver.tokens[again] == expected_tokens(PROMPT[:length], 4)


def test_answers_are_prefixes_too(drive: Drive) -> None:
    driver = drive()
    first = run(driver, max_tokens=8)
    turn = (*PROMPT, *driver.tokens[first], 7, 8)  # the next turn of a conversation
    second = run(driver, turn)
    assert cached_tokens(driver, second) == 20  # the last answer token was never computed
    assert driver.tokens[second] == expected_tokens(turn, 4)


def test_a_prefix_ends_where_tokens_differ(drive: Drive) -> None:
    driver = drive()
    run(driver)
    other = (*PROMPT[:9], 99, *PROMPT[10:])
    assert cached_tokens(driver, run(driver, other)) == 8
    assert cached_tokens(driver, run(driver, (99, *PROMPT[1:]))) == 0


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"tenant": "t"}, {"tenant": "u"}),
        ({"adapter": "a"}, {}),
        ({}, {"adapter": "a"}),
        ({"adapter": "a"}, {"adapter": "b"}),
        ({"adapter": "a", "tenant": "t"}, {"adapter": "a", "tenant": "u"}),
    ],
)
def test_kv_is_shared_by_neither_tenants_nor_adapters(
    drive: Drive, first: dict[str, Any], second: dict[str, Any]
) -> None:
    driver = drive()
    run(driver, **first)
    stranger, same = run(driver, **second), run(driver, **first)
    assert (cached_tokens(driver, stranger), cached_tokens(driver, same)) == (0, 12)


def test_an_adapter_that_left_and_came_back_finds_its_prefixes(drive: Drive) -> None:
    driver = drive(max_resident_adapters=1)
    run(driver, adapter="a")
    run(driver, adapter="b")
    again = run(driver, adapter="a")
    assert driver.started_loads == ["a", "b", "a"]
    assert cached_tokens(driver, again) == 12


def test_running_requests_share_blocks(drive: Drive) -> None:
    driver = drive(max_prefill_tokens=64)
    driver.submit(PROMPT, max_tokens=9)
    driver.step()
    driver.submit(PROMPT, max_tokens=9)
    driver.step()
    assert driver.scheduler.status().kv_blocks == 5  # 3 shared, each one's own last
    driver.run_until_idle()
    status = driver.scheduler.status()
    assert (status.kv_blocks, status.free_blocks) == (0, driver.config.total_blocks)
    assert status.prefix_blocks > 0


def test_requests_that_come_together_compute_a_common_beginning_once(drive: Drive) -> None:
    driver = drive(max_prefill_tokens=14)
    driver.runner.keep_plans = True
    ids = [driver.submit(PROMPT, max_tokens=3) for _ in range(4)]
    driver.run_until_idle()
    assert [cached_tokens(driver, i) for i in ids] == [0, 12, 12, 12]
    computed = [len(s.token_ids) for p in driver.runner.plans for s in p.sequences if not s.position >= 14]
    assert sum(computed) == 14 + 3 * 2
    assert all(driver.tokens[i] == expected_tokens(PROMPT, 3) for i in ids)
    assert driver.scheduler._counters.counter("default") == 14 + 3 * 2 + 2 * 4 * 3


def test_off_means_off(drive: Drive) -> None:
    driver = drive(prefix_cache=False)
    run(driver)
    assert cached_tokens(driver, run(driver)) == 0
    assert driver.scheduler.status().prefix_blocks == 0


def test_a_preempted_request_finds_what_is_left_of_itself(drive: Drive) -> None:
    driver = drive(total_blocks=10)
    driver.runner.keep_plans = True
    for _ in range(2):
        driver.submit(prompt=12, max_tokens=12)
    driver.run_until_idle()
    assert driver.scheduler.status().num_preempted == 1
    again = [s for p in driver.runner.plans for s in p.sequences if s.request_id == 2 and len(s.token_ids) > 1][-1]
    assert again.position >= 8
    assert cached_tokens(driver, 2) == 0  # its own blocks are no discount
    assert driver.tokens[2] == expected_tokens(driver.prompts[2], 12)


def test_idle_prefixes_leave_for_new_requests_the_end_of_a_chain_first(drive: Drive) -> None:
    driver = drive(total_blocks=8)
    run(driver, max_tokens=1)  # leaves 3 idle blocks
    run(driver, tuple(range(101, 125)), max_tokens=1)  # needs 6: one of the first's must leave
    assert driver.scheduler.status().prefix_blocks == 8 - 0 - driver.scheduler._memory.arena.free
    assert cached_tokens(driver, run(driver)) == 8


def test_what_was_used_often_stays_longer(drive: Drive) -> None:
    driver = drive(total_blocks=9)
    for _ in range(4):
        run(driver, max_tokens=1)
    for start in (50, 80, 110, 140):
        run(driver, tuple(range(start, start + 13)), max_tokens=1)
    assert cached_tokens(driver, run(driver, max_tokens=1)) == 12


def test_a_step_that_failed_leaves_nothing_to_find(drive: Drive) -> None:
    driver = drive()
    driver.submit(PROMPT)
    driver.fail_next_step = True
    driver.step()
    assert cached_tokens(driver, run(driver)) == 0


def test_chains_differ_by_each_part_and_not_by_how_the_parts_are_cut() -> None:
    starts = {
        chain_start("base", None, "t"),
        chain_start("base", "base", "t"),
        chain_start("base", None, "u"),
        chain_start("base2", None, "t"),
        chain_start("bas", None, "et"),
    }
    assert len(starts) == 5
    start = chain_start("base", None, "t")
    assert next_key(start, [1, 2]) == next_key(start, (1, 2)) != next_key(start, [2, 1])
    assert next_key(next_key(start, [1]), [2]) != next_key(start, [1, 2])
