"""Pins as tables and properties: where they belong, when they are sent, and what is undone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.pins import PIN_ON_ALL
from router.catalog import Adapter, Version
from router.orders import Deliveries, Order, OrderKind
from router.pins import AWAY_S, UNDO_AFTER_S, Pin, PinAnswer, PinPlanner, UnmetPin, desired_pins
from router.placement import Residency, State, Tier, WorkerView, rendezvous_weight

BASE = "b" * 64
PINNED = Residency(Tier.DEVICE, pinned=True)


def version(tag: str) -> Version:
    return Version(f"v-{tag}", f"a-{tag}", BASE)


def pins(*tags: str, replicas: int = 1) -> dict[str, Pin]:
    return {f"a-{tag}": Pin(version(tag), replicas) for tag in tags}


def worker(worker_id: str, *pinned: str, **fields: object) -> WorkerView:
    view = WorkerView(f"{worker_id}:1", State.SERVING, worker_id, "e1", BASE)
    return replace(view, adapters={f"a-{tag}": PINNED for tag in pinned}, **fields)  # type: ignore[arg-type]


def fleet(count: int, **fields: object) -> list[WorkerView]:
    return [worker(f"w{i}", **fields) for i in range(count)]


def told(orders: tuple[Order, ...]) -> list[tuple[OrderKind, str, str]]:
    return [(order.kind, order.worker_id, order.version.artifact_digest) for order in orders]


def first_of(tag: str, workers: list[WorkerView]) -> list[str]:
    """Worker ids in the order in which they get a pin."""
    return sorted((w.worker_id for w in workers), key=lambda name: rendezvous_weight(f"a-{tag}", name), reverse=True)


def carried_out(orders: tuple[Order, ...], workers: list[WorkerView]) -> list[WorkerView]:
    """The workers after they did as they were told."""
    done = {w.worker_id: dict(w.adapters) for w in workers}
    for order in orders:
        digest = order.version.artifact_digest
        done[order.worker_id][digest] = replace(PINNED, pinned=order.kind is OrderKind.PIN)
    return [replace(w, adapters=done[w.worker_id]) for w in workers]


def test_a_pin_that_is_not_kept_is_told_as_far_as_it_is_known_why():
    planner, workers = PinPlanner(), fleet(3)
    wanted = pins("x", replicas=PIN_ON_ALL)
    assert planner.unmet(wanted, [], {}) == {"a-x": UnmetPin(0, 1, {})}  # no worker is known yet
    planner.plan(wanted, workers, 0.0, in_step=True)
    assert planner.unmet(wanted, workers, {}) == {}  # they have been told just now, perhaps
    answers = {
        ("w0", "a-x"): PinAnswer("e1", 1, "no room"),
        ("w1", "a-x"): PinAnswer("e1", 3, ""),
        ("w2", "a-x"): PinAnswer("e0", 3, "no room"),  # before its engine was started anew
    }
    assert planner.unmet(wanted, workers, answers) == {
        "a-x": UnmetPin(0, 3, {"w0": "refuses: no room", "w1": "was told 3 times and lets go of it; its log says why"})
    }
    refused = replace(PINNED, tier=Tier.DISK, quarantine_reason="CORRUPT_ARTIFACT")
    workers = [
        worker("w0", "x"),
        worker("w1", state=State.UNREACHABLE),
        replace(worker("w2"), adapters={"a-x": refused}),
    ]
    assert planner.unmet(wanted, workers, answers) == {
        "a-x": UnmetPin(1, 3, {"w1": "is away", "w2": "cannot have it: CORRUPT_ARTIFACT"})
    }
    assert planner.unmet(wanted, [worker(f"w{i}", "x") for i in range(3)], answers) == {}


def test_the_catalogs_pins_are_of_current_versions_and_the_larger_of_two_names():
    def adapter(name: str, tag: str, replicas: int) -> Adapter:
        return Adapter("default", name, "tiny", version(tag), (version(tag), version("old")), replicas)

    adapters = [adapter("x", "x", 0), adapter("sql", "sql", 1), adapter("sql-too", "sql", 3), adapter("y", "y", 2)]
    assert desired_pins(adapters) == pins("sql", replicas=3) | pins("y", replicas=2)


@pytest.mark.parametrize(("replicas", "count"), [(1, 1), (3, 3), (4, 4), (9, 4), (PIN_ON_ALL, 4)])
def test_a_pin_goes_to_so_many_workers_or_to_all_there_are(replicas, count):
    workers = fleet(4)
    plan = PinPlanner().plan(pins("x", replicas=replicas), workers, 0.0, in_step=True)
    assert sorted(told(plan.orders)) == sorted((OrderKind.PIN, name, "a-x") for name in first_of("x", workers)[:count])


@pytest.mark.parametrize("state", [state for state in State if state is not State.SERVING])
def test_only_workers_of_the_base_that_serve_are_told(state):
    workers = [worker("w1", state=state), worker("w2", base_digest="c" * 64), worker("w3", silent=True)]
    assert PinPlanner().plan(pins("x", replicas=9), workers, 0.0, in_step=True).orders == ()


def test_dedicated_workers_keep_no_pins_and_take_nobodys_place():
    dedicated = [worker(f"d{i}", "y", dedicated_artifact_digest="a-x") for i in range(4)]
    planner = PinPlanner()
    for now_s in (0.0, UNDO_AFTER_S + 1):
        plan = planner.plan(pins("x", replicas=2), [*dedicated, worker("w1")], now_s, in_step=True)
        assert told(plan.orders) == [(OrderKind.PIN, "w1", "a-x")]


def test_what_is_pinned_already_is_not_told_and_a_new_epoch_is_told_anew():
    planner = PinPlanner()
    assert planner.plan(pins("x"), [worker("w1", "x")], 0.0, in_step=True).orders == ()
    restarted = worker("w1", epoch="e2")
    (order,) = planner.plan(pins("x"), [restarted], 1.0, in_step=True).orders
    assert (order.kind, order.epoch) == (OrderKind.PIN, "e2")


def test_a_worker_that_is_away_keeps_its_place_for_a_while():
    workers = fleet(3)
    first, second, _ = first_of("x", workers)
    planner = PinPlanner()
    planner.plan(pins("x"), workers, 0.0, in_step=True)
    away = [replace(w, state=State.UNREACHABLE) if w.worker_id == first else w for w in workers]
    plan = planner.plan(pins("x"), away, AWAY_S, in_step=True)
    assert plan.orders == ()
    assert plan.again_s is not None
    plan = planner.plan(pins("x"), away, plan.again_s, in_step=True)
    assert told(plan.orders) == [(OrderKind.PIN, second, "a-x")]


def test_a_worker_that_drains_loses_its_place_at_once():
    workers = fleet(3)
    first, second, _ = first_of("x", workers)
    planner = PinPlanner()
    planner.plan(pins("x"), workers, 0.0, in_step=True)
    draining = [replace(w, state=State.DRAINING) if w.worker_id == first else w for w in workers]
    assert told(planner.plan(pins("x"), draining, 0.1, in_step=True).orders) == [(OrderKind.PIN, second, "a-x")]


def test_a_pin_this_router_saw_end_is_undone_at_once_before_others_are_made():
    planner = PinPlanner()
    planner.plan(pins("old"), [worker("w1", "old")], 0.0, in_step=True)
    plan = planner.plan(pins("new"), [worker("w1", "old")], 0.1, in_step=True)
    assert told(plan.orders) == [(OrderKind.UNPIN, "w1", "a-old"), (OrderKind.PIN, "w1", "a-new")]
    assert plan.orders[0].version == version("old")


def test_a_pin_of_somebody_else_is_undone_when_it_was_wrong_for_a_while():
    planner = PinPlanner()
    workers = [worker("w1", "theirs")]
    plan = planner.plan({}, workers, 5.0, in_step=True)
    assert (plan.orders, plan.again_s) == ((), 5.0 + UNDO_AFTER_S)
    assert planner.plan(pins("theirs"), workers, 8.0, in_step=True).orders == ()  # the catalog was late
    plan = planner.plan(pins("theirs"), workers, 16.0, in_step=True)
    assert plan.orders == ()
    other = PinPlanner()
    other.plan({}, workers, 5.0, in_step=True)
    assert told(other.plan({}, workers, 5.0 + UNDO_AFTER_S, in_step=True).orders) == [
        (OrderKind.UNPIN, "w1", "a-theirs")
    ]


def test_without_the_registry_pins_are_made_and_none_is_undone():
    planner = PinPlanner()
    workers = [worker("w1", "gone")]
    assert told(planner.plan(pins("x"), workers, 0.0, in_step=True).orders) == [(OrderKind.PIN, "w1", "a-x")]
    assert told(planner.plan(pins("x"), workers, 1000.0, in_step=False).orders) == [(OrderKind.PIN, "w1", "a-x")]
    plan = planner.plan(pins("x"), workers, 1001.0, in_step=True)  # the while begins when the registry is back
    assert (told(plan.orders), plan.again_s) == ([(OrderKind.PIN, "w1", "a-x")], 1001.0 + UNDO_AFTER_S)


def test_one_worker_too_many_keeps_a_pin_until_those_that_shall_have_it_on_their_device():
    names = first_of("x", fleet(2))
    planner = PinPlanner()
    first, second = worker(names[0]), worker(names[1], "x")
    planner.plan(pins("x"), [first, second], 0.0, in_step=True)
    plan = planner.plan(pins("x"), [first, second], 100.0, in_step=True)
    assert told(plan.orders) == [(OrderKind.PIN, names[0], "a-x")]
    loading = replace(first, adapters={"a-x": Residency(Tier.DISK, pinned=True, loading=True)})
    assert planner.plan(pins("x"), [loading, second], 101.0, in_step=True).orders == ()
    there = worker(names[0], "x")
    assert told(planner.plan(pins("x"), [there, second], 102.0, in_step=True).orders) == [
        (OrderKind.UNPIN, names[1], "a-x")
    ]


def test_routers_that_see_different_workers_do_not_fight():
    """One cannot reach the worker that shall keep the pin, and pins to the next; the other undoes that, and so on."""
    names = first_of("x", fleet(2))
    here = {name: worker(name) for name in names}
    routers = [(PinPlanner(), Deliveries()) for _ in range(2)]
    orders_by_minute = [0] * 20
    for now_s in range(20 * 60):
        for at, (planner, deliveries) in enumerate(routers):
            seen = [
                replace(here[name], state=State.UNREACHABLE) if at == 1 and name == names[0] else here[name]
                for name in names
            ]
            plan = planner.plan(pins("x"), seen, float(now_s), in_step=True)
            due, _ = deliveries.begin(plan.orders, float(now_s))
            for order in due:
                (here[order.worker_id],) = carried_out((order,), [here[order.worker_id]])
                deliveries.end(order, float(now_s))
                orders_by_minute[now_s // 60] += 1
    assert here[names[0]].adapters["a-x"].pinned
    assert sum(orders_by_minute[:5]) > 2  # they do disagree
    assert max(orders_by_minute[5:]) <= 2


tags = st.sampled_from("abcd")
some_pins = st.dictionaries(tags, st.integers(1, 4)).map(
    lambda wanted: {f"a-{tag}": Pin(version(tag), replicas) for tag, replicas in wanted.items()}
)
some_workers = st.lists(st.sets(tags), min_size=1, max_size=5).map(
    lambda held: [worker(f"w{i}", *sorted(tags)) for i, tags in enumerate(held)]
)


@settings(max_examples=50)
@given(wanted=some_pins, workers=some_workers)
def test_routers_agree_and_come_to_rest_with_every_pin_where_it_belongs(
    wanted: dict[str, Pin], workers: list[WorkerView]
) -> None:
    one, other = PinPlanner(), PinPlanner()
    now_s = 0.0
    for _ in range(4):
        first = one.plan(wanted, workers, now_s, in_step=True).orders
        assert set(told(first)) == set(told(other.plan(wanted, workers[::-1], now_s, in_step=True).orders))
        workers = carried_out(first, workers)
        now_s += UNDO_AFTER_S
    assert one.plan(wanted, workers, now_s, in_step=True).orders == ()
    for digest, pin in wanted.items():
        holders = {w.worker_id for w in workers if w.adapters.get(digest) == PINNED}
        assert holders == set(first_of(digest.removeprefix("a-"), workers)[: pin.replicas])
    assert {d for w in workers for d, residency in w.adapters.items() if residency.pinned} == set(wanted)


@settings(max_examples=50)
@given(wanted=some_pins, count=st.integers(2, 6), lost=st.integers(0, 5))
def test_a_pin_moves_only_where_its_worker_goes(wanted: dict[str, Pin], count: int, lost: int) -> None:
    workers = fleet(count)
    workers = carried_out(PinPlanner().plan(wanted, workers, 0.0, in_step=True).orders, workers)
    gone = workers[lost % count]
    left = [w for w in workers if w is not gone]
    moved = PinPlanner().plan(wanted, left, 0.0, in_step=True).orders
    assert {order.version.artifact_digest for order in moved} <= {
        digest for digest, residency in gone.adapters.items() if residency.pinned
    }
