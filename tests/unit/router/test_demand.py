"""Rates that forget: steady traffic is told as it is, old traffic halves, and keys are bounded."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.demand import AdapterKey, DecayedSums, Demand

SQL, JSON, BASE = AdapterKey("default", "sql"), AdapterKey("default", "json"), AdapterKey("default", "")


@settings(max_examples=25)
@given(rate=st.floats(1, 5), half_life_s=st.floats(10, 30))
def test_steady_traffic_is_told_at_its_rate(rate: float, half_life_s: float) -> None:
    sums: DecayedSums[str] = DecayedSums(half_life_s, 1)
    now_s = 0.0
    while now_s < 7 * half_life_s:
        now_s += 1 / rate
        sums.add("x", (1.0,), now_s)
    (told,) = sums.per_second(now_s + 0.5 / rate)["x"]
    assert told == pytest.approx(rate, rel=0.05)


def test_what_is_no_longer_asked_for_halves_and_is_forgotten():
    sums: DecayedSums[str] = DecayedSums(60.0, 2)
    sums.add("x", (8.0, 2.0), 100.0)
    (first, other), (later, _) = sums.per_second(100.0)["x"], sums.per_second(160.0)["x"]
    assert first / later == pytest.approx(2.0)
    assert first / other == pytest.approx(4.0)
    assert sums.per_second(100.0 + 60 * 10) == {}
    assert len(sums) == 0


def test_a_clock_that_stands_still_or_events_out_of_order_do_no_harm():
    sums: DecayedSums[str] = DecayedSums(60.0, 1)
    sums.add("x", (1.0,), 10.0)
    sums.add("x", (1.0,), 9.0)
    assert sums.per_second(10.0)["x"][0] == pytest.approx(2 * math.log(2) / 60, rel=0.05)


def test_keys_are_bounded_and_the_least_asked_for_go():
    sums: DecayedSums[int] = DecayedSums(60.0, 1, max_keys=100)
    for key in range(50):
        sums.add(key, (5.0,), 0.0)
    for key in range(50, 1000):
        sums.add(key, (1.0,), 1.0)
    assert len(sums) <= 100
    assert set(range(50)) <= set(sums.per_second(1.0))


def test_demand_is_told_by_adapter_most_first_and_by_worker():
    demand = Demand(60.0)
    for _ in range(3):
        demand.arrived(SQL, 100, 0.0)
        demand.placed("w1", SQL, 0.0)
    demand.arrived(JSON, 7, 0.0)
    demand.placed("w2", JSON, 0.0)
    demand.placed("w1", BASE, 0.0)
    demand.waited(JSON, 0.5, 0.0)
    sql, json = demand.adapters(0.0)
    one = math.log(2) / 60
    assert (sql.key, json.key, sql.cold_rate) == (SQL, JSON, 0)
    assert [sql.rate, sql.prompt_tokens, json.prompt_tokens] == pytest.approx([3 * one, 100, 7])
    assert [json.cold_rate, json.load_share] == pytest.approx([one, one / 2])
    rates = demand.workers(0.0)
    assert rates["w1"] == {SQL: pytest.approx(3 * one), BASE: pytest.approx(one)}
    assert set(rates["w2"]) == {JSON}


def test_an_adapter_that_only_waited_has_no_demand_of_its_own():
    demand = Demand(60.0)
    demand.waited(SQL, 0.5, 0.0)
    assert demand.adapters(0.0) == []
