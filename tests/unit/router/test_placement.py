"""placement.pick as tables and properties."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.errors import NoWorker
from loraplex.types.v1 import generation_pb2
from router.placement import (
    TIE_RATIO,
    TIE_S,
    PlacementRequest,
    Residency,
    State,
    Tier,
    WorkerView,
    expected_s,
    homes,
    pick,
    rendezvous_weight,
)

BASE = "b" * 64
ADAPTER = "a" * 64
WORKER = WorkerView(
    address="h:1",
    state=State.SERVING,
    worker_id="w1",
    base_digest=BASE,
    prefill_tokens_per_second=1000.0,
    decode_tokens_per_second=100.0,
)
REQUEST = PlacementRequest(BASE, prompt_tokens=100)
WITH_ADAPTER = replace(REQUEST, artifact_digest=ADAPTER, artifact_bytes=10_000_000)


def rng() -> random.Random:
    return random.Random(1)


def view(worker_id: str, **fields: object) -> WorkerView:
    return replace(WORKER, worker_id=worker_id, address=f"{worker_id}:1", **fields)  # type: ignore[arg-type]


def dedicated(worker_id: str, digest: str = ADAPTER, **fields: object) -> WorkerView:
    return view(
        worker_id,
        dedicated_artifact_digest=digest,
        adapters={digest: Residency(Tier.DEVICE, in_flight=0)},
        **fields,
    )


def test_a_dedicated_worker_goes_first_and_gets_nothing_else() -> None:
    shared = view("shared", adapters={ADAPTER: Residency(Tier.DEVICE)})
    own, foreign = dedicated("own", running_requests=40), dedicated("foreign", "c" * 64)
    fleet = [shared, own, foreign]
    assert pick(WITH_ADAPTER, fleet, rng()).worker is own  # 0.4 s later than the idle one
    assert pick(REQUEST, fleet, rng()).worker is shared
    assert pick(replace(WITH_ADAPTER, beside_base=True), fleet, rng()).worker is shared
    assert pick(replace(WITH_ADAPTER, artifact_digest="d" * 64), fleet, rng()).worker is shared
    assert pick(WITH_ADAPTER, fleet, rng(), exclude=["own"]).worker is shared


def test_a_dedicated_worker_that_is_far_behind_is_relieved() -> None:
    shared, own = view("shared"), dedicated("own", running_requests=200)
    assert pick(WITH_ADAPTER, [shared, own], rng()).worker is shared
    assert pick(WITH_ADAPTER, [own], rng()).worker is own
    silent = replace(own, running_requests=0, silent=True)
    assert pick(WITH_ADAPTER, [shared, silent], rng()).worker is shared


def test_dedicated_workers_of_one_adapter_share_its_requests() -> None:
    fleet = [dedicated("one"), dedicated("two"), view("shared")]
    picked = {pick(WITH_ADAPTER, fleet, random.Random(seed)).worker.worker_id for seed in range(40)}
    assert picked == {"one", "two"}


def test_workers_for_other_adapters_only_are_told_as_such() -> None:
    with pytest.raises(NoWorker) as none:
        pick(REQUEST, [dedicated("one"), dedicated("two", "c" * 64)], rng())
    assert none.value.metadata["why"] == "dedicated"


def test_tiers_are_numbered_as_on_the_wire() -> None:
    assert {f"ADAPTER_TIER_{tier.name}": int(tier) for tier in Tier} == {
        name: value for name, value in generation_pb2.AdapterTier.items() if value
    }


@pytest.mark.parametrize(
    ("fields", "request_", "seconds"),
    [
        ({}, REQUEST, 0.1),
        ({"queued_prefill_tokens": 400}, REQUEST, 0.5),
        ({"own_prompt_tokens": 400}, REQUEST, 0.5),
        ({"max_context_tokens": 60}, REQUEST, 0.06),
        ({"max_context_tokens": 200}, REQUEST, 0.1),
        ({"running_requests": 5}, REQUEST, 0.15),
        ({"own_requests": 5}, REQUEST, 0.15),
        ({"waiting_requests": 1}, REQUEST, 0.26),
        ({"adapters": {ADAPTER: Residency(Tier.DEVICE)}}, WITH_ADAPTER, 0.1),
        ({"adapters": {ADAPTER: Residency(Tier.HOST)}}, WITH_ADAPTER, 0.1 + 0.001 + 0.00125),
        ({"adapters": {ADAPTER: Residency(Tier.DISK)}}, WITH_ADAPTER, 0.1 + 0.005 + 0.01),
        ({"adapters": {ADAPTER: Residency(Tier.DISK, loading=True)}}, WITH_ADAPTER, 0.1 + 0.0075),
        ({}, WITH_ADAPTER, 0.1 + 0.05 + 0.1),
        ({"own_adapters": frozenset({ADAPTER})}, WITH_ADAPTER, 0.1 + 0.075),
    ],
)
def test_the_expected_time_adds_up(fields: dict[str, object], request_: PlacementRequest, seconds: float) -> None:
    assert expected_s(replace(WORKER, **fields), request_) == pytest.approx(seconds)  # type: ignore[arg-type]


def test_a_worker_that_reports_no_speed_divides_by_nothing() -> None:
    assert expected_s(replace(WORKER, prefill_tokens_per_second=0, decode_tokens_per_second=0), REQUEST) == 100


def test_the_shorter_queue_wins() -> None:
    busy, free = view("w1", queued_prefill_tokens=1000), view("w2")
    assert {pick(REQUEST, [busy, free], random.Random(seed)).worker.worker_id for seed in range(20)} == {"w2"}


def test_a_resident_adapter_wins_until_its_queue_costs_more_than_loading_elsewhere() -> None:
    resident = view("w1", adapters={ADAPTER: Residency(Tier.DEVICE)})
    cold = view("w2")
    assert pick(WITH_ADAPTER, [resident, cold], rng()).worker.worker_id == "w1"
    swamped = replace(resident, queued_prefill_tokens=1000)
    assert pick(WITH_ADAPTER, [swamped, cold], rng()).worker.worker_id == "w2"


def test_among_equals_the_base_goes_at_random() -> None:
    workers = [view(f"w{i}") for i in range(4)]
    chosen = [pick(REQUEST, workers, random.Random(seed)).worker.worker_id for seed in range(100)]
    assert {chosen.count(worker.worker_id) > 10 for worker in workers} == {True}


def test_a_small_adapter_stays_where_it_is_although_loading_it_would_tie() -> None:
    tiny = replace(WITH_ADAPTER, artifact_bytes=1000)
    here = view("w1", adapters={ADAPTER: Residency(Tier.DEVICE)})
    elsewhere = view("w2", adapters={ADAPTER: Residency(Tier.DISK)})
    assert {pick(tiny, [here, elsewhere], random.Random(seed)).worker.worker_id for seed in range(20)} == {"w1"}


@pytest.mark.parametrize(("replicas", "used"), [(0, 4), (1, 1), (2, 2), (9, 4)])
def test_no_more_devices_are_used_than_an_adapter_shall_be_on(replicas: int, used: int) -> None:
    workers = [view(f"w{i}", adapters={ADAPTER: Residency(Tier.DEVICE)}) for i in range(4)]
    request = replace(WITH_ADAPTER, replicas=replicas)
    chosen = {pick(request, workers, random.Random(seed)).worker.worker_id for seed in range(60)}
    ranked = sorted((f"w{i}" for i in range(4)), key=lambda name: rendezvous_weight(ADAPTER, name), reverse=True)
    assert chosen == set(ranked[:used])


def test_one_device_too_many_is_used_again_where_waiting_for_the_others_costs_more() -> None:
    workers = [view(f"w{i}", adapters={ADAPTER: Residency(Tier.DEVICE)}) for i in range(2)]
    first = pick(replace(WITH_ADAPTER, replicas=1), workers, rng()).worker.worker_id
    swamped = [replace(w, queued_prefill_tokens=1000) if w.worker_id == first else w for w in workers]
    assert pick(replace(WITH_ADAPTER, replicas=1), swamped, rng()).worker.worker_id != first


def test_silent_workers_are_used_only_if_nothing_else_is() -> None:
    silent, busy = view("w1", silent=True), view("w2", queued_prefill_tokens=50_000)
    assert pick(REQUEST, [silent, busy], rng()).worker.worker_id == "w2"
    assert pick(REQUEST, [silent], rng()).worker.worker_id == "w1"


@pytest.mark.parametrize("tier", [Tier.SOURCE, Tier.DISK])
def test_a_worker_that_refuses_the_adapter_goes_last(tier: Tier) -> None:
    refused = {ADAPTER: Residency(tier, quarantine_reason="CORRUPT_ARTIFACT", quarantine_end_s=1e12)}
    refusing = view("w1", adapters=refused)
    for seed in range(20):
        for busy in (0, 100_000):
            other = view(f"other{seed}", queued_prefill_tokens=busy)
            assert pick(WITH_ADAPTER, [refusing, other], rng()).worker is other
            assert homes(BASE, ADAPTER, [refusing, other]) == [other, refusing]
    assert pick(REQUEST, [refusing, view("w2", queued_prefill_tokens=9000)], rng()).worker is refusing
    assert pick(WITH_ADAPTER, [refusing], rng()).worker is refusing  # which says why, and until when
    over = replace(refusing, adapters={ADAPTER: Residency(tier)})
    assert pick(WITH_ADAPTER, [over, view("w2", queued_prefill_tokens=9000)], rng()).worker is over


@pytest.mark.parametrize(
    ("workers", "exclude", "why"),
    [
        ([], (), "none_known"),
        ([view("w1", state=State.UNREACHABLE)], (), "none_reachable"),
        ([view("w1", base_digest="c" * 64)], (), "no_such_base"),
        ([view("w1", base_digest="c" * 64), view("w2", state=State.UNREACHABLE)], (), "no_such_base"),
        ([view("w1", base_digest="", state=State.STARTING)], (), "starting"),
        ([view("w1", state=State.STARTING)], (), "starting"),
        ([view("w1", state=State.DRAINING), view("w2", state=State.DRAINING)], (), "draining"),
        ([view("w1", state=State.NOT_SERVING), view("w2", state=State.DRAINING)], (), "not_serving"),
        ([view("w1")], ("w1",), "none_left"),
    ],
)
def test_no_worker_says_why(workers: Sequence[WorkerView], exclude: Sequence[str], why: str) -> None:
    with pytest.raises(NoWorker) as caught:
        pick(REQUEST, workers, rng(), exclude)
    assert caught.value.metadata["why"] == why


digests = st.sampled_from(["1" * 64, "2" * 64, "3" * 64])
views = st.builds(
    WorkerView,
    address=st.uuids().map(str),
    state=st.sampled_from(State),
    worker_id=st.uuids().map(str),
    base_digest=st.sampled_from([BASE, "c" * 64]),
    running_requests=st.integers(0, 100),
    waiting_requests=st.integers(0, 100),
    queued_prefill_tokens=st.integers(0, 100_000),
    prefill_tokens_per_second=st.floats(0, 1e5),
    decode_tokens_per_second=st.floats(0, 1e4),
    adapters=st.dictionaries(digests, st.builds(Residency, st.sampled_from(Tier), st.booleans())),
    silent=st.booleans(),
    own_requests=st.integers(0, 10),
    own_prompt_tokens=st.integers(0, 10_000),
)
requests = st.builds(
    PlacementRequest,
    base_digest=st.just(BASE),
    prompt_tokens=st.integers(1, 10_000),
    artifact_digest=st.one_of(st.just(""), digests),
    artifact_bytes=st.integers(0, 10**9),
)


@given(requests, st.lists(views, max_size=6), st.integers())
def test_a_pick_is_usable_and_about_the_best(request_: PlacementRequest, workers: list[WorkerView], seed: int) -> None:
    usable = [worker for worker in workers if worker.state is State.SERVING and worker.base_digest == BASE]
    try:
        choice = pick(request_, workers, random.Random(seed))
    except NoWorker:
        assert not usable
        return
    assert choice.worker in usable
    assert not choice.worker.silent or all(worker.silent for worker in usable)
    best = min(expected_s(worker, request_) for worker in usable if worker.silent == choice.worker.silent)
    assert choice.expected_s <= best + max(TIE_S, TIE_RATIO * best)


@given(digests, st.lists(st.uuids().map(str), min_size=1, max_size=8, unique=True), st.randoms(use_true_random=False))
def test_routers_agree_where_a_cold_adapter_belongs(digest: str, ids: list[str], shuffle: random.Random) -> None:
    workers = [view(worker_id) for worker_id in ids]
    request = replace(WITH_ADAPTER, artifact_digest=digest)
    first = pick(request, workers, random.Random(1)).worker.worker_id
    shuffle.shuffle(workers)
    assert pick(request, workers, random.Random(2)).worker.worker_id == first


@given(digests, st.lists(st.uuids().map(str), min_size=2, max_size=8, unique=True))
def test_a_worker_that_leaves_moves_only_its_own_adapters(digest: str, ids: list[str]) -> None:
    home = max(ids, key=lambda worker_id: rendezvous_weight(digest, worker_id))
    left = [worker_id for worker_id in ids if worker_id != ids[0]]
    after = max(left, key=lambda worker_id: rendezvous_weight(digest, worker_id))
    assert after == home or home == ids[0]
