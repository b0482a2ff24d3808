"""Tenants: who comes first, by what they have had."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.worker.engine.driver import Driver
from worker.engine import fairness
from worker.engine.fairness import TenantCounters

Drive = Callable[..., Driver]


def tokens_of(driver: Driver, tenant_ids: list[int]) -> int:
    return sum(len(driver.prompts[i]) + 2 * len(driver.tokens[i]) for i in tenant_ids if driver.tokens[i])


def test_a_tenant_with_eight_times_the_requests_gets_no_more_than_the_other(drive: Drive) -> None:
    driver = drive(max_running_requests=2, total_blocks=64, prefix_cache=False)
    loud: list[int] = []
    quiet: list[int] = []
    for _ in range(12):
        loud += [driver.submit(prompt=6, max_tokens=5, tenant="loud") for _ in range(8)]
        quiet.append(driver.submit(prompt=6, max_tokens=5, tenant="quiet"))
    while any(driver.is_live(i) for i in quiet):
        driver.step()
    assert tokens_of(driver, loud) == pytest.approx(tokens_of(driver, quiet), rel=0.15)
    driver.run_until_idle()
    assert set(loud) <= set(driver.finished)


def test_several_are_admitted_at_once_in_turns(drive: Drive) -> None:
    driver = drive(max_running_requests=4)
    first = [driver.submit(prompt=3, tenant="first") for _ in range(6)]
    other = [driver.submit(prompt=3, tenant="other") for _ in range(6)]
    driver.step()
    assert set(driver.first_step) == {*first[:2], *other[:2]}


def test_requests_of_any_size_count_by_their_tokens(drive: Drive) -> None:
    driver = drive(max_running_requests=2, total_blocks=64, prefix_cache=False)
    large = [driver.submit(prompt=40, max_tokens=20, tenant="large") for _ in range(30)]
    small = [driver.submit(prompt=5, max_tokens=2, tenant="small") for _ in range(120)]
    while any(driver.is_live(i) for i in small):
        driver.step()
    assert tokens_of(driver, large) == pytest.approx(tokens_of(driver, small), rel=0.2)


def test_weights_share_in_their_proportion(drive: Drive) -> None:
    driver = drive(max_running_requests=2, total_blocks=64, prefix_cache=False)
    once = [driver.submit(prompt=6, max_tokens=5, tenant="once") for _ in range(100)]
    thrice = [driver.submit(prompt=6, max_tokens=5, tenant="thrice", weight=3.0) for _ in range(100)]
    while any(driver.is_live(i) for i in thrice):
        driver.step()
    assert tokens_of(driver, thrice) / tokens_of(driver, once) == pytest.approx(3.0, rel=0.2)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_a_weight_that_is_none_is_refused(drive: Drive, weight: float) -> None:
    driver = drive()
    driver.submit(weight=weight)
    assert (driver.failed[1].reason, driver.failed[1].metadata) == ("INVALID_PARAMETER", {"field": "weight"})


def test_one_tenant_s_requests_keep_their_order(drive: Drive) -> None:
    driver = drive(max_running_requests=1)
    ids = [driver.submit(prompt=3 + i % 5, max_tokens=2) for i in range(10)]
    driver.run_until_idle()
    steps = [driver.first_step[i] for i in ids]
    assert steps == sorted(steps)


def test_nobody_saves_up_while_away(drive: Drive) -> None:
    driver = drive(max_running_requests=1, prefix_cache=False)
    for _ in range(30):
        driver.submit(prompt=6, max_tokens=5, tenant="steady")
    for _ in range(60):
        driver.step()
    back = [driver.submit(prompt=6, max_tokens=5, tenant="back") for _ in range(8)]
    before = [i for i in driver.prompts if driver.is_live(i) and i not in back]
    driver.run_until_idle()
    order = sorted([*back, *before], key=lambda i: driver.first_step[i])
    taken = [i in back for i in order[:8]]
    assert 3 <= sum(taken) <= 5  # taking turns, not all of the one that had nothing


def test_cold_loads_are_charged_to_whom_they_are_for(drive: Drive) -> None:
    driver = drive(max_resident_adapters=2)
    driver.submit(adapter="a", max_tokens=1, tenant="loads", prompt=3)
    driver.submit(max_tokens=1, tenant="plain", prompt=3)
    driver.step()
    driver.finish_load(0, seconds=2.0)
    driver.run_until_idle()
    counters = driver.scheduler._counters
    rate = 100.0  # tokens per second that the driver says it computes of prompts
    assert counters.counter("loads") - counters.counter("plain") == pytest.approx(2.0 * rate, rel=0.5)


def test_cached_tokens_are_not_charged(drive: Drive) -> None:
    driver = drive()
    prompt = tuple(range(1, 15))
    driver.submit(prompt, max_tokens=1)
    driver.run_until_idle()
    counters = driver.scheduler._counters
    assert counters.counter("default") == 14 + 2
    driver.submit(prompt, max_tokens=1)
    driver.run_until_idle()
    assert counters.counter("default") == 14 + 2 + 2 + 2


def test_recomputing_is_not_charged(drive: Drive) -> None:
    driver = drive(total_blocks=5, prefix_cache=False)
    for _ in range(2):
        driver.submit(prompt=7, max_tokens=8)
    driver.run_until_idle()
    assert driver.scheduler.status().num_preempted == 1
    assert driver.scheduler._counters.counter("default") == 2 * (7 + 2 * 8)


def test_a_tenant_alone_is_lifted_to_the_last_that_waited() -> None:
    counters = TenantCounters()
    counters.charge("a", input_tokens=100)
    counters.charge("b", input_tokens=40)
    counters.lift("c", [], "a")
    counters.lift("d", ["a", "b"], None)
    counters.lift("a", ["b"], "b")
    assert [counters.counter(t) for t in "abcde"] == [100, 40, 100, 40, 0]


def test_counters_of_absent_tenants_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairness, "MAX_TENANTS", 10)
    counters = TenantCounters()
    for number in range(200):
        counters.charge(f"t{number}", input_tokens=number)
        counters.forget_absent(lambda: {"t0", "t1"})
    assert len(counters._tenants) <= 11
    assert counters.counter("t1") == 1
    assert counters.counter("t199") == 199
