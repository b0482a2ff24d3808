"""Advice as tables: what the traffic must look like for each kind, and what is said then."""

from __future__ import annotations

import pytest

from router.advice import MAX_PER_KIND, Advice, AdviceKind, about_pins, advise
from router.catalog import Adapter, Version
from router.demand import AdapterDemand, AdapterKey
from router.pins import UnmetPin


def demand(name: str, rate: float, cold_rate: float = 0.0, load_share: float = 0.0, tenant: str = "t") -> AdapterDemand:
    return AdapterDemand(AdapterKey(tenant, name), rate, 100.0, cold_rate, load_share)


def told(*demands: AdapterDemand, pinned: tuple[str, ...] = ()) -> list[tuple[AdviceKind, str, str]]:
    found = advise(demands, {}, {AdapterKey("t", name) for name in pinned}, 0.1)
    return [(advice.kind, advice.tenant, advice.adapter) for advice in found]


@pytest.mark.parametrize(
    ("rate", "cold_rate", "pinned", "advised"),
    [
        (0.1, 0.021, (), True),
        (0.1, 0.019, (), False),
        (0.09, 0.09, (), False),
        (5.0, 4.0, (), True),
        (5.0, 4.0, ("x",), False),
    ],
)
def test_a_busy_adapter_whose_requests_wait_for_it_should_be_kept(rate, cold_rate, pinned, advised):
    assert told(demand("x", rate, cold_rate, 0.01), pinned=pinned) == (
        [(AdviceKind.PROMOTE, "t", "x")] if advised else []
    )


def test_advice_to_keep_an_adapter_says_how_often_and_how_long_it_is_waited_for():
    (advice,) = advise([demand("x", 2.0, 0.5, 0.1)], {}, (), 0.1)
    assert advice.figures == {"requests_per_second": 2.0, "cold_ratio": 0.25, "mean_load_s": 0.2}
    assert advice.reason == (
        "25% of its 2 requests per second wait for it to be loaded, 0.2 s each; pin it (loraplex adapter pin x), or "
        "give adapters more room"
    )


def adapter(name: str, pin_replicas: int = 2) -> Adapter:
    version = Version(f"v-{name}", f"a-{name}", "base")
    return Adapter("t", name, "base", version, (version,), pin_replicas=pin_replicas)


def test_pins_that_are_not_kept_are_told_with_the_reasons_the_worst_first_and_no_more_than_so_many():
    unmet = {
        "a-half": UnmetPin(1, 2, {"w1": "refuses: the arena is full"}),
        "a-none": UnmetPin(0, 5, {f"w{number}": "is away" for number in range(5)}),
        "a-nowhere": UnmetPin(0, 1, {}),
        "a-unpinned": UnmetPin(0, 1, {}),
    }
    adapters = [*(adapter(name) for name in ("half", "none", "nowhere", "kept")), adapter("unpinned", 0)]
    none, nowhere, half = about_pins(adapters, unmet)
    assert (half.kind, half.tenant, half.adapter, half.worker_id) == (AdviceKind.UNMET_PIN, "t", "half", "w1")
    assert half.figures == {"kept_ratio": 0.5}
    assert half.reason == "pinned on 1 of 2 workers; w1 refuses: the arena is full"
    assert none.reason.endswith(" 0 of 5 workers; w0 is away; w1 is away; w2 is away; and 2 more")
    assert nowhere.reason.endswith(" 0 of 1 workers; no worker of its base is here")
    many = [adapter(f"x{number}") for number in range(MAX_PER_KIND + 5)]
    assert len(about_pins(many, {f"a-x{number}": UnmetPin(0, 1, {}) for number in range(99)})) == MAX_PER_KIND


def throttled(*demands: AdapterDemand) -> list[tuple[str, str]]:
    return [(tenant, name) for kind, tenant, name in told(*demands) if kind is AdviceKind.THROTTLE]


def test_an_adapter_that_makes_most_of_the_waiting_with_few_requests_should_be_bounded():
    assert throttled(demand("big", 0.1, 0.05, 0.3), demand("x", 0.9, 0.05, 0.1)) == [("t", "big")]


@pytest.mark.parametrize(
    ("big", "other"),
    [
        (demand("big", 0.1, 0.05, 0.3), demand("x", 0.9)),  # nobody else waits
        (demand("big", 0.1, 0.05, 0.05), demand("x", 0.9, 0.01, 0.01)),  # hardly anybody waits
        (demand("big", 0.5, 0.05, 0.3), demand("x", 0.5, 0.05, 0.1)),  # it has its share of the requests
        (demand("big", 0.1, 0.05, 0.2), demand("x", 0.9, 0.05, 0.3)),  # others wait more
    ],
)
def test_waiting_that_displaces_nobody_or_is_earned_is_let_be(big, other):
    assert throttled(big, other) == []


def test_a_tenant_of_many_cold_adapters_should_be_bounded_though_no_single_one_should():
    many = [demand(f"m{i}", 0.02, 0.02, 0.04, tenant="many") for i in range(10)]
    assert throttled(*many, demand("x", 2.0, 0.1, 0.1, tenant="few")) == [("many", "")]


@pytest.mark.parametrize(
    ("rates", "advised"),
    [
        ({"x": 0.8, "y": 0.2}, True),
        ({"x": 0.79, "y": 0.21}, False),
        ({"x": 0.9}, False),  # too little for a worker of its own
        ({"": 5.0, "x": 1.0}, False),  # the base needs no merging
        ({"x": 9.0, "": 1.0}, True),
    ],
)
def test_an_adapter_that_makes_most_of_a_workers_requests_should_be_merged(rates, advised):
    workers = {"w1": {AdapterKey("t", name): rate for name, rate in rates.items()}}
    found = advise([], workers, (), 0.1)
    assert [(a.kind, a.adapter, a.worker_id) for a in found] == ([(AdviceKind.MERGE, "x", "w1")] if advised else [])


def test_advice_is_bounded_and_the_most_pressing_comes_first():
    many = [demand(f"x{i}", 1.0 + i, 0.5 + i, 0.001) for i in range(MAX_PER_KIND + 5)]
    found: tuple[Advice, ...] = advise(many, {}, (), 0.1)
    assert [advice.adapter for advice in found] == [f"x{i}" for i in range(MAX_PER_KIND + 4, 4, -1)]


def test_no_traffic_needs_no_advice():
    assert advise([], {}, (), 0.1) == ()
