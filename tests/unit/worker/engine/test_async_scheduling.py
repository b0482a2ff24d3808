"""Plans made while one is in flight: what they count on, what they leave out, and what is kept for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fake_runner import expected_tokens
from tests.unit.worker.engine.driver import Driver
from worker.engine.plan import PENDING, StepPlan


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    return Driver(tmp_path, max_in_flight=2)


def planned(driver: Driver) -> StepPlan:
    """Take a turn that must make a plan."""
    plan = driver.step()
    assert plan is not None
    return plan


def computed(plan: StepPlan) -> dict[int, tuple[int, ...]]:
    """The tokens that a plan computes, by request."""
    return {sequence.request_id: sequence.token_ids for sequence in plan.sequences}


def test_the_token_of_the_step_in_flight_is_pending_in_the_next_plan(driver: Driver) -> None:
    request = driver.submit(prompt=3, max_tokens=4)
    assert computed(planned(driver)) == {request: driver.prompts[request]}
    assert driver.tokens[request] == []  # nothing is answered yet
    assert computed(planned(driver)) == {request: (PENDING,)}
    assert len(driver.tokens[request]) == 1
    driver.run_until_idle()
    assert driver.tokens[request] == expected_tokens(driver.prompts[request], 4)


def test_no_more_than_two_plans_are_in_flight(driver: Driver) -> None:
    driver.submit(max_tokens=9)
    for _ in range(2):
        assert driver.scheduler.schedule(driver.now).plan is not None
    with pytest.raises(ValueError, match="plan of step 1 has not been answered"):
        driver.scheduler.schedule(driver.now)


def test_plans_are_answered_in_their_order(driver: Driver) -> None:
    driver.submit(max_tokens=9)
    plans = [driver.scheduler.schedule(driver.now).plan for _ in range(2)]
    results = [driver.runner.start(plan).result() for plan in plans if plan is not None]
    assert plans[1] is not None
    with pytest.raises(ValueError, match="step 2 is not the one to be answered"):
        driver.scheduler.update(plans[1], results[1], 0.01, driver.now)


def test_who_ends_with_the_pending_token_is_not_planned_again(driver: Driver) -> None:
    short, long = driver.submit(max_tokens=1), driver.submit(max_tokens=4)
    assert computed(planned(driver)).keys() == {short, long}
    assert computed(planned(driver)).keys() == {long}
    assert driver.finished[short].finish == "length"


def test_a_lone_request_that_ends_with_the_pending_token_leaves_nothing_to_plan(driver: Driver) -> None:
    driver.submit(max_tokens=1)
    planned(driver)
    assert driver.step() is None
    assert driver.finished
    assert driver.scheduler.status().kv_blocks == 0


def test_who_ends_by_a_stop_token_has_computed_one_row_in_vain_and_keeps_its_chunks_for_it(tmp_path: Path) -> None:
    prompt = (5, 6, 7)
    second = expected_tokens(prompt, 2)[1]
    driver = Driver(tmp_path, max_in_flight=2, eos_token_ids=frozenset({second}))
    request = driver.submit(prompt=prompt, max_tokens=9, adapter=None)
    for _ in range(2):
        planned(driver)
    assert computed(planned(driver)) == {request: (PENDING,)}  # the one in vain
    assert driver.tokens[request] == expected_tokens(prompt, 2)
    assert driver.finished[request].finish == "stop"
    status = driver.scheduler.status()
    assert (status.running_requests, status.kv_blocks > 0) == (0, True)
    assert driver.step() is None
    assert driver.scheduler.status().kv_blocks == 0
    other = driver.submit()
    assert planned(driver).ended_request_ids == (request,)
    driver.run_until_idle()
    assert driver.finished[other].finish == "length"


def test_nobody_is_preempted_while_a_plan_is_in_flight(tmp_path: Path) -> None:
    driver = Driver(tmp_path, max_in_flight=2, total_blocks=6, max_context_tokens=20, kv_watermark=0.0)
    old, young = driver.submit(prompt=3, max_tokens=14), driver.submit(prompt=3, max_tokens=14)
    seen = []
    for _ in range(40):
        in_flight = len(driver.in_flight)
        before = driver.scheduler.status().num_preempted
        driver.step()
        if driver.scheduler.status().num_preempted > before:
            seen.append(in_flight)
        if not driver.live:
            break
    assert seen
    assert set(seen) == {0}
    for request in (old, young):
        assert driver.tokens[request] == expected_tokens(driver.prompts[request], 14)


def test_what_is_aborted_is_kept_until_the_last_plan_with_it_is_answered(driver: Driver) -> None:
    gone = driver.submit(adapter="a", max_tokens=9)
    driver.step()
    driver.finish_loads()
    first, second = (driver.scheduler.schedule(driver.now).plan for _ in range(2))
    assert first is not None
    assert second is not None
    results = [driver.runner.start(plan).result() for plan in (first, second)]
    driver.abort(gone)
    assert driver.scheduler.update(first, results[0], 0.01, driver.now) == []
    assert (driver.scheduler.status().kv_blocks, driver.told()["a"].in_flight) == (1, 1)
    assert driver.scheduler.update(second, results[1], 0.01, driver.now) == []
    assert (driver.scheduler.status().kv_blocks, driver.told()["a"].in_flight) == (0, 0)


def test_a_step_that_fails_takes_with_it_the_one_that_goes_on_from_it_and_no_more(driver: Driver) -> None:
    lost = driver.submit(max_tokens=9)
    planned(driver)
    planned(driver)
    driver.fail_next_step = True
    planned(driver)
    joined = driver.submit(max_tokens=9)
    assert computed(planned(driver)).keys() == {lost, joined}  # the failure is not known yet
    late = driver.submit(max_tokens=2)
    driver.run_until_idle()
    assert set(driver.failed) == {lost, joined}
    assert driver.tokens[late] == expected_tokens(driver.prompts[late], 2)
    assert driver.scheduler.status().kv_blocks == 0


def test_new_requests_join_while_a_plan_is_in_flight(driver: Driver) -> None:
    first = driver.submit(max_tokens=6)
    planned(driver)
    second = driver.submit(prompt=5, max_tokens=2)
    assert computed(planned(driver)) == {first: (PENDING,), second: driver.prompts[second]}
    driver.run_until_idle()
    for request, count in ((first, 6), (second, 2)):
        assert driver.tokens[request] == expected_tokens(driver.prompts[request], count)


def test_a_comparison_waits_for_the_plan_in_flight_and_is_not_kept_waiting_by_the_next(driver: Driver) -> None:
    driver.submit(max_tokens=20)
    planned(driver)
    asked = driver.compare((1, 2, 3), driver.file("a"), driver.file("b"))
    plans = []
    while driver.comparing:
        plans.append(driver.step())
        driver.finish_loads()
        assert len(plans) < 12
    assert driver.compared[asked].same_top
    (comparing,) = [plan for plan in plans if plan is not None and plan.comparison is not None]
    assert PENDING not in [token for sequence in comparing.sequences for token in sequence.token_ids]


def test_who_is_announced_again_before_a_step_fails_is_not_told_as_ended_once_more(tmp_path: Path) -> None:
    driver = Driver(tmp_path, max_in_flight=2, total_blocks=6, chunk_bytes=16, adapter_chunk_bytes=16, kv_watermark=0.0)
    driver.submit(adapter=driver.file("a", size=32), max_tokens=1)
    old, young = driver.submit(prompt=3, max_tokens=3), driver.submit(prompt=4, max_tokens=9)
    for _ in range(3):
        driver.step()
    driver.fail_next_step = True
    preempting = planned(driver)
    assert (set(computed(preempting)), preempting.ended_request_ids) == ({old}, (young,))
    driver.fail_load(*driver.loading)  # its chunks are free: the young one can come again at once
    assert [new.request_id for new in planned(driver).new_requests] == [young]
    assert old in driver.failed
    driver.run_until_idle()
    assert driver.tokens[young] == expected_tokens(driver.prompts[young], 9)


def test_a_comparison_does_not_join_the_plan_that_admits_the_last_who_waited_while_one_is_in_flight(
    driver: Driver,
) -> None:
    warm = driver.submit(adapter="a", max_tokens=1)
    driver.step()
    driver.finish_loads()
    driver.run_until_idle()
    assert driver.finished[warm]
    first = driver.submit(prompt=3, max_tokens=20)
    planned(driver)
    second = driver.submit(prompt=3, max_tokens=20)
    asked = driver.compare((1, 2, 3), driver.file("a"), driver.file("a"))
    plan = planned(driver)
    assert (set(computed(plan)), plan.comparison) == ({first, second}, None)
    driver.run_until_idle()
    assert driver.compared[asked].same_top
    assert driver.scheduler.status().kv_blocks == 0
