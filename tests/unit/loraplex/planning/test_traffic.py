from __future__ import annotations

from dataclasses import replace

import pytest

from loraplex.errors import InvalidParameter
from loraplex.planning.adapters import adapter_shape, weigh
from loraplex.planning.devices import DEVICES, Links, load_times, named_device, parse_size
from loraplex.planning.memory import WorkerPlan, account
from loraplex.planning.shapes import MODULES, SHAPES
from loraplex.planning.traffic import FleetPlan, Traffic, plan_fleet, popularity_shares

SHAPE, DEVICE = SHAPES["Llama-3.1-8B"], DEVICES["H100"]
TRAFFIC = Traffic(10, 500, 100, num_adapters=64, prefill_tokens_per_s=10_000, decode_tokens_per_s=2_000)


def fleet(traffic: Traffic = TRAFFIC, slots: int = 32) -> FleetPlan:
    plan = WorkerPlan(concurrency=32, context_tokens=2048, max_resident_adapters=slots)
    memory = account(SHAPE, DEVICE, plan)
    kind = adapter_shape(SHAPE, rank=16, form="int8", targets=MODULES)
    weight = weigh(SHAPE, kind, memory.layout, memory.chunk_bytes)
    return plan_fleet(SHAPE, DEVICE, plan, memory, weight, Links(), traffic)


def test_given_speeds_decide_by_the_documented_formula() -> None:
    found = fleet(replace(TRAFFIC, num_adapters=1))
    assert found.requests_per_s_per_worker == pytest.approx(1 / (500 / 10_000 + 100 / 2_000))  # 10
    assert found.num_workers == found.for_tokens == 2  # 10 / (10 * 0.7), rounded up
    assert found.busy_share == pytest.approx(0.5)
    assert found.request_s == pytest.approx(500 / 10_000 + 100 * 32 / 2_000)
    assert not found.speeds_assumed


def test_workers_grow_with_the_traffic_and_never_shrink() -> None:
    counts = [fleet(replace(TRAFFIC, requests_per_s=rate)).num_workers for rate in (1, 5, 7, 8, 50, 500)]
    assert counts == sorted(counts)
    assert counts[2:4] == [1, 2]  # 7 requests a second keep one worker busy for 70 % of the time
    assert counts[-1] == pytest.approx(500 / 7, abs=1)


def test_adapters_beyond_the_devices_are_loaded_and_counted() -> None:
    found = fleet(replace(TRAFFIC, num_adapters=1000, popularity="uniform"))
    assert found.adapters_per_worker == 32  # the slots' number, which is less than what fits
    assert found.adapters_in_fleet == 64
    assert found.hit_share == pytest.approx(0.064)
    assert found.loads_per_s_per_worker == pytest.approx(10 * (1 - 0.064) / 2)
    roomy = fleet(replace(TRAFFIC, num_adapters=1000, popularity="uniform"), slots=500)
    assert roomy.hit_share == pytest.approx(1.0)
    assert roomy.loads_per_s_per_worker == 0


def test_loads_that_two_threads_cannot_carry_take_workers() -> None:
    many = replace(TRAFFIC, requests_per_s=1000, num_adapters=100_000, popularity="uniform", decode_tokens_per_s=1e6)
    found = fleet(replace(many, prefill_tokens_per_s=1e7))
    assert found.num_workers > found.for_tokens
    assert found.loads_per_s_per_worker * found.load_s <= 1


def test_a_hot_adapter_is_held_by_several() -> None:
    found = fleet(replace(TRAFFIC, requests_per_s=70, num_adapters=2, popularity="zipf:3"))
    assert found.copies_of_hottest == 9  # 8/9 of 70 requests, 7 for each worker
    assert found.hit_share == 1.0


def test_assumed_speeds_follow_the_device_and_are_said_to_be() -> None:
    here = fleet(Traffic(1, 500, 100))
    assert here.speeds_assumed
    # 15.0 GB of weights, 2.3 GB of 32 contexts of 550 tokens, and an adapter, at 0.6 of 3.35 TB/s
    assert here.decode_tokens_per_s == pytest.approx(32 / (17.35e9 / 2.01e12), rel=0.01)
    assert here.prefill_tokens_per_s == pytest.approx(0.4 * 989e12 / (2 * 7.5e9), rel=0.02)


def test_popularity_is_a_distribution() -> None:
    for kind in ("uniform", "zipf:1.0", "zipf:1.5", "zipf:0"):
        shares = popularity_shares(kind, 1000)
        assert sum(shares) == pytest.approx(1)
        assert shares == sorted(shares, reverse=True)
    assert popularity_shares("zipf:1", 3)[0] == pytest.approx(6 / 11)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"requests_per_s": 0}, "--requests-per-s is 0"),
        ({"requests_per_s": float("inf")}, "--requests-per-s is inf"),
        ({"popularity": "pareto"}, "--popularity 'pareto'"),
        ({"popularity": "zipf:-1"}, "--popularity 'zipf:-1'"),
        ({"num_adapters": 0}, "--adapters is 0"),
        ({"num_adapters": 2_000_000}, "--adapters is 2000000"),
        ({"utilisation": 1.5}, "--utilisation is 1.5"),
        ({"prompt_tokens": 2000}, "--context is 2048"),
        ({"decode_tokens_per_s": -1.0}, "--decode-tokens-per-s is -1"),
        ({"requests_per_s": 1e9}, "more than 100000 workers"),
        ({"utilisation": 1e-320}, "more than 100000 workers"),
        ({"prefill_tokens_per_s": 1e-320}, "more than 100000 workers"),
        ({"prompt_tokens": 10**400}, "--prompt-tokens is 1000"),
    ],
)
def test_bad_input_is_refused_by_flag(change: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidParameter, match=words):
        fleet(replace(TRAFFIC, **change))  # type: ignore[arg-type]


def test_loads_get_slower_with_every_tier() -> None:
    times = load_times(42_000_000, DEVICE, Links())
    assert [time.source for time in times] == ["host memory", "disk", "network", "object store"]
    assert [time.seconds for time in times] == sorted(time.seconds for time in times)
    assert times[0].seconds == pytest.approx(42e6 / 50e9)
    assert times[3].seconds == pytest.approx(42e6 * (1 / 50e9 + 1 / 3e9 + 1 / 1e9 + 1 / 0.2e9) + 0.0502)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("80GB", 80 * 10**9),
        ("16GiB", 2**34),
        ("1.5 GiB", 3 * 2**29),
        ("200MB/s", 2 * 10**8),
        ("4096", 4096),
        ("24g", 24 * 10**9),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, num_bytes: int) -> None:
    assert parse_size(text, "--memory") == num_bytes


@pytest.mark.parametrize("text", ["", "0", "-1GB", "many", "10i", "1e9", "5 XB", "0.5", "9" * 400])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidParameter, match="--memory"):
        parse_size(text, "--memory")


def test_devices_are_found_as_people_write_them() -> None:
    assert named_device("a100 40gb") is DEVICES["A100-40"]
    assert named_device("RTX 4090") is DEVICES["RTX-4090"]
    with pytest.raises(InvalidParameter, match="--device 'TPU'"):
        named_device("TPU")
