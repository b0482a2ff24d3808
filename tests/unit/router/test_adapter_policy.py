"""The automatic policy as tables and properties: what is fetched where, when it steps up and down, and its bounds."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.adapter_policy import AdapterPolicy, PolicyPlan, PolicySettings, Wanted
from router.catalog import Version
from router.demand import AdapterDemand, AdapterKey
from router.orders import OrderKind
from router.placement import Residency, State, Tier, TierUse, WorkerView, rendezvous_weight

BASE = "b" * 64
SETTINGS = PolicySettings(promote_rate=1.0, demote_rate=0.3, dwell_s=60.0, spread_after_s=2.0, max_replicas=3)


def wanted(tag: str = "x", rate: float = 1.0, artifact_bytes: int = 1_000_000) -> Wanted:
    demand = AdapterDemand(AdapterKey("default", tag.partition("-")[0]), rate, 100.0, 0.0, 0.0)
    return Wanted(demand, Version(f"v-{tag}", f"a-{tag}", BASE, artifact_bytes=artifact_bytes))


def worker(worker_id: str, **fields: object) -> WorkerView:
    view = WorkerView(
        f"{worker_id}:1",
        State.SERVING,
        worker_id,
        "e1",
        BASE,
        prefill_tokens_per_second=1000.0,
        decode_tokens_per_second=100.0,
    )
    return replace(view, **fields)  # type: ignore[arg-type]


def fleet(count: int = 4) -> list[WorkerView]:
    return [worker(f"w{i}") for i in range(count)]


def ranked(tag: str, workers: list[WorkerView]) -> list[str]:
    return sorted((w.worker_id for w in workers), key=lambda name: rendezvous_weight(f"a-{tag}", name), reverse=True)


def told(plan: PolicyPlan) -> set[tuple[OrderKind, str, str]]:
    return {(order.kind, order.worker_id, order.version.artifact_digest) for order in plan.orders}


def carried_out(plan: PolicyPlan, workers: list[WorkerView]) -> list[WorkerView]:
    held = {w.worker_id: dict(w.adapters) for w in workers}
    for order in plan.orders:
        tier = Tier.DEVICE if order.kind is OrderKind.TO_DEVICE else Tier.DISK
        held[order.worker_id][order.version.artifact_digest] = Residency(tier)
    return [replace(w, adapters=held[w.worker_id]) for w in workers]


def on_device(workers: list[WorkerView], tag: str = "x") -> set[str]:
    return {
        w.worker_id
        for w in workers
        if (residency := w.adapters.get(f"a-{tag}")) is not None and residency.tier is Tier.DEVICE
    }


def busy(workers: list[WorkerView], names: set[str], tokens: int = 5000) -> list[WorkerView]:
    return [replace(w, queued_prefill_tokens=tokens if w.worker_id in names else 0) for w in workers]


@pytest.mark.parametrize(
    ("rate", "kinds"),
    [
        (0.29, []),
        (0.3, [OrderKind.TO_DISK]),
        (0.99, [OrderKind.TO_DISK]),
        (1.0, [OrderKind.TO_DEVICE, OrderKind.TO_DISK]),
    ],
)
def test_the_rate_decides_how_near_an_adapter_is_kept_to_where_its_requests_go(rate, kinds):
    workers = fleet()
    plan = AdapterPolicy(SETTINGS).plan([wanted(rate=rate)], workers, 0.0)
    assert [(order.kind, order.worker_id) for order in plan.orders] == list(
        zip(kinds, ranked("x", workers), strict=False)
    )
    assert plan.replicas == ({"a-x": 1} if OrderKind.TO_DEVICE in kinds else {})


@pytest.mark.parametrize(
    "residency",
    [
        Residency(Tier.DEVICE),
        Residency(Tier.DISK, loading=True),
        Residency(Tier.DISK, quarantine_reason="CORRUPT_ARTIFACT"),
    ],
)
def test_what_is_there_or_on_its_way_or_cannot_come_is_not_told_again(residency):
    only = worker("w1", adapters={"a-x": residency})
    assert AdapterPolicy(SETTINGS).plan([wanted()], [only], 0.0).orders == ()


@pytest.mark.parametrize(("rate", "kind"), [(0.5, OrderKind.TO_DISK), (1.0, OrderKind.TO_DEVICE)])
def test_what_one_worker_refuses_is_kept_on_the_one_that_its_requests_go_to_instead(rate, kind):
    first, second = ranked("x", fleet(2))
    refusing = worker(first, adapters={"a-x": Residency(Tier.SOURCE, quarantine_reason="ARTIFACT_NOT_FOUND")})
    for tokens in (0, 5000):
        other = worker(second, queued_prefill_tokens=tokens)
        plan = AdapterPolicy(SETTINGS).plan([wanted(rate=rate)], [refusing, other], 0.0)
        assert told(plan) == {(kind, second, "a-x")}


def test_nothing_is_fetched_to_dedicated_workers_nor_for_requests_that_go_there():
    workers = [*(worker(f"d{i}", dedicated_artifact_digest="a-own") for i in range(4)), worker("w1")]
    plan = AdapterPolicy(SETTINGS).plan([wanted("own"), wanted("x")], workers, 0.0)
    assert told(plan) == {(OrderKind.TO_DEVICE, "w1", "a-x")}
    gone = [replace(w, state=State.UNREACHABLE) if w.dedicated_artifact_digest else w for w in workers]
    plan = AdapterPolicy(SETTINGS).plan([wanted("own")], gone, 0.0)
    assert told(plan) == {(OrderKind.TO_DEVICE, "w1", "a-own")}


def test_a_hot_adapter_stays_where_it_is_already_whatever_the_hashes_say():
    workers = fleet()
    last = ranked("x", workers)[-1]
    workers = [replace(w, adapters={"a-x": Residency(Tier.DEVICE)}) if w.worker_id == last else w for w in workers]
    plan = AdapterPolicy(SETTINGS).plan([wanted()], workers, 0.0)
    assert told(plan) == {(OrderKind.TO_DISK, ranked("x", workers)[0], "a-x")}


def test_a_new_version_of_a_hot_adapter_is_fetched_before_its_requests_come():
    policy, workers = AdapterPolicy(SETTINGS), fleet(1)
    workers = carried_out(policy.plan([wanted("x-1")], workers, 0.0), workers)
    assert told(policy.plan([wanted("x-2")], workers, 1.0)) == {(OrderKind.TO_DEVICE, "w0", "a-x-2")}


def test_a_restarted_worker_gets_its_hot_adapter_back():
    policy, workers = AdapterPolicy(SETTINGS), fleet(1)
    policy.plan([wanted()], carried_out(policy.plan([wanted()], workers, 0.0), workers), 1.0)
    (order,) = policy.plan([wanted()], [worker("w0", epoch="e2")], 2.0).orders
    assert (order.kind, order.epoch) == (OrderKind.TO_DEVICE, "e2")


def test_between_the_thresholds_an_adapter_stays_as_it_is():
    policy, workers = AdapterPolicy(SETTINGS), fleet(1)
    assert policy.plan([wanted(rate=0.5)], workers, 0.0).replicas == {}
    policy.plan([wanted(rate=1.0)], workers, 1.0)
    assert policy.plan([wanted(rate=0.5)], workers, 1000.0).replicas == {"a-x": 1}
    assert policy.plan([wanted(rate=0.2)], workers, 1001.0).replicas == {}


def test_nothing_is_demoted_before_its_time():
    policy, workers = AdapterPolicy(SETTINGS), fleet(1)
    policy.plan([wanted()], workers, 0.0)
    assert policy.plan([wanted(rate=0.0)], workers, 59.0).replicas == {"a-x": 1}
    policy.plan([], workers, 59.5)
    assert len(policy.promoted) == 1
    policy.plan([], workers, 60.0)
    assert len(policy.promoted) == 0


def test_a_replica_is_added_where_waiting_costs_more_than_loading_elsewhere_for_a_while():
    policy, workers = AdapterPolicy(SETTINGS), fleet()
    first, second, *_ = ranked("x", workers)
    workers = carried_out(policy.plan([wanted(rate=5.0)], workers, 0.0), workers)
    pressed = busy(workers, {first})
    assert policy.plan([wanted(rate=5.0)], pressed, 10.0).replicas == {"a-x": 1}
    assert policy.plan([wanted(rate=5.0)], pressed, 11.9).replicas == {"a-x": 1}
    plan = policy.plan([wanted(rate=5.0)], pressed, 12.0)
    assert plan.replicas == {"a-x": 2}
    plan = policy.plan([wanted(rate=5.0)], pressed, 13.0)
    assert (OrderKind.TO_DEVICE, second, "a-x") in told(plan)


def test_a_moment_of_waiting_adds_nothing():
    policy, workers = AdapterPolicy(SETTINGS), fleet()
    workers = carried_out(policy.plan([wanted(rate=5.0)], workers, 0.0), workers)
    pressed = busy(workers, on_device(workers))
    for now_s in range(10, 40, 2):
        assert policy.plan([wanted(rate=5.0)], pressed, float(now_s)).replicas == {"a-x": 1}
        policy.plan([wanted(rate=5.0)], workers, now_s + 1.0)


def test_a_replica_goes_to_no_worker_that_is_as_busy():
    policy, workers = AdapterPolicy(SETTINGS), fleet(3)
    first, second, third = ranked("x", workers)
    workers = carried_out(policy.plan([wanted(rate=5.0)], workers, 0.0), workers)
    pressed = busy(workers, {first, second})
    for now_s in (10.0, 12.0):
        policy.plan([wanted(rate=5.0)], pressed, now_s)
    device = {
        where for kind, where, _ in told(policy.plan([wanted(rate=5.0)], pressed, 13.0)) if kind is OrderKind.TO_DEVICE
    }
    assert device == {third}


def test_replicas_are_bounded_and_shrink_one_by_one_when_the_rate_has_halved():
    policy, workers = AdapterPolicy(SETTINGS), fleet(6)
    now_s = 0.0
    for _ in range(60):
        plan = policy.plan([wanted(rate=8.0)], busy(workers, on_device(workers)), now_s)
        workers = carried_out(plan, workers)
        now_s += 1.0
    assert plan.replicas == {"a-x": 3}
    idle = busy(workers, set())
    counts = []
    for _ in range(400):
        counts.append(policy.plan([wanted(rate=3.0)], idle, now_s).replicas["a-x"])
        now_s += 1.0
    first, second = (at for at in range(1, len(counts)) if counts[at] != counts[at - 1])
    assert (counts[0], counts[first], counts[second], counts[-1]) == (3, 2, 1, 1)
    assert second - first >= SETTINGS.dwell_s


def test_a_rate_at_a_threshold_makes_no_adapter_flap():
    policy, workers = AdapterPolicy(SETTINGS), fleet(2)
    changes = Counter()  # type: ignore[var-annotated]
    before: object = None
    for now_s in range(600):
        plan = policy.plan([wanted(rate=1.0 if now_s % 2 else 0.9)], workers, float(now_s))
        changes[plan.replicas != before] += 1
        before = plan.replicas
    assert changes[True] <= 2


def test_only_what_fits_most_of_a_tier_is_fetched_ahead_and_the_most_asked_for_first():
    use = TierUse(0, 10_000_000, 0)
    only = worker("w1", device_tier=use, disk_tier=TierUse(0, 100, 0))
    many = [wanted(f"x{i}", rate=9.0 - i / 10, artifact_bytes=3_000_000) for i in range(5)]
    plan = AdapterPolicy(SETTINGS).plan(many, [only], 0.0)
    assert told(plan) == {(OrderKind.TO_DEVICE, "w1", "a-x0"), (OrderKind.TO_DEVICE, "w1", "a-x1")}
    there = replace(only, adapters={"a-x0": Residency(Tier.DEVICE), "a-x1": Residency(Tier.DEVICE)})
    assert AdapterPolicy(SETTINGS).plan(many, [there], 1.0).orders == ()  # the third would push one of them out
    pinned = replace(only, adapters={"a-p": Residency(Tier.DEVICE, pinned=True, artifact_bytes=4_000_000)})
    assert told(AdapterPolicy(SETTINGS).plan(many, [pinned], 0.0)) == {(OrderKind.TO_DEVICE, "w1", "a-x0")}


def held(*tags: str, **fields: object) -> dict[str, Residency]:
    return {f"a-{tag}": Residency(Tier.DEVICE, artifact_bytes=1_000_000, **fields) for tag in tags}  # type: ignore[arg-type]


def with_places(count: int, **fields: object) -> WorkerView:
    return worker("w1", device_tier=TierUse(0, 2**30, 0, count), **fields)


def devices(plan: PolicyPlan) -> list[str]:
    return [order.version.artifact_digest for order in plan.orders if order.kind is OrderKind.TO_DEVICE]


def test_places_are_counted_as_bytes_are_and_what_finds_none_is_kept_on_the_disk():
    many = [wanted(f"x{i}", rate=9.0 - i / 100) for i in range(100)]
    plan = AdapterPolicy(SETTINGS).plan(many, [with_places(32)], 0.0)
    assert devices(plan) == [f"a-x{i}" for i in range(25)]
    assert {order.kind for order in plan.orders[25:]} == {OrderKind.TO_DISK}
    there = with_places(32, adapters=held(*(f"x{i}" for i in range(32))))
    plan = AdapterPolicy(SETTINGS).plan(many, [there], 1.0)
    assert devices(plan) == []  # what is there already is the most asked for
    pins = with_places(32, adapters=held(*(f"p{i}" for i in range(20)), pinned=True))
    assert len(devices(AdapterPolicy(SETTINGS).plan(many, [pins], 0.0))) == 5
    assert len(devices(AdapterPolicy(SETTINGS).plan(many, [with_places(0)], 0.0))) == 64  # bytes alone bound it


def test_what_is_on_a_device_is_not_exchanged_for_its_equal():
    there = with_places(2, adapters=held("x1"))  # a share for one
    for rate, told_now in ((2.0, []), (2.4, []), (2.6, ["a-x2"])):
        plan = AdapterPolicy(SETTINGS).plan([wanted("x2", rate), wanted("x1", 2.0)], [there], 0.0)
        assert devices(plan) == told_now


rates = st.lists(st.floats(0, 20), min_size=1, max_size=6)
loads = st.lists(st.integers(0, 20_000), min_size=1, max_size=5)


@settings(max_examples=50)
@given(rounds=st.lists(st.tuples(rates, loads), min_size=1, max_size=30))
def test_whatever_comes_orders_are_for_serving_workers_of_the_base_and_replicas_in_bounds(
    rounds: list[tuple[list[float], list[int]]],
) -> None:
    policy = AdapterPolicy(SETTINGS)
    workers = [*fleet(5), worker("other", base_digest="c" * 64), worker("gone", state=State.UNREACHABLE)]
    now_s = 0.0
    for its_rates, its_loads in rounds:
        workers = [replace(w, queued_prefill_tokens=its_loads[at % len(its_loads)]) for at, w in enumerate(workers)]
        asked = [wanted(f"x{at}", rate) for at, rate in enumerate(its_rates)]
        plan = policy.plan(sorted(asked, key=lambda entry: -entry.demand.rate), workers, now_s)
        assert all(order.worker_id in {f"w{i}" for i in range(5)} for order in plan.orders)
        assert len({order.key for order in plan.orders}) == len(plan.orders)
        assert all(1 <= count <= SETTINGS.max_replicas for count in plan.replicas.values())
        workers = carried_out(plan, workers)
        now_s += 7.0
