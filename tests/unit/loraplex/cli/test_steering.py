"""`loraplex adapter` pin, unpin, prefetch and unload, and what `worker list` tells, against a fake cluster."""

from __future__ import annotations

import pytest

from loraplex.pins import PIN_ON_ALL


@pytest.fixture(autouse=True)
def _sql(run, tiny_adapter):
    assert run("adapter", "add", "sql", tiny_adapter).code == 0


def test_a_pin_is_to_one_worker_unless_told(run, fake_cluster):
    assert run("adapter", "pin", "sql").out == "sql is pinned to 1 worker of base tiny\n"
    assert fake_cluster.adapters["sql"].pin_replicas == 1
    assert run("adapter", "pin", "sql").out == "sql is pinned already to 1 worker of base tiny\n"


@pytest.mark.parametrize(
    ("replicas", "stored", "said"), [("3", 3, "to 3 workers of"), ("all", PIN_ON_ALL, "to all workers of")]
)
def test_a_pin_is_to_as_many_workers_as_told_and_shown(run, fake_cluster, replicas, stored, said):
    assert said in run("adapter", "pin", "sql", "--replicas", replicas).out
    assert fake_cluster.adapters["sql"].pin_replicas == stored
    assert run("adapter", "list").out.splitlines()[1].rstrip().endswith(f" {replicas}")
    assert f"pinned   to {replicas} of the base's workers" in run("adapter", "show", "sql").out
    assert run("adapter", "list", "--json").json()["adapters"][0]["pin_replicas"] == stored


def test_unpinning_tells_whether_it_was(run, fake_cluster):
    run("adapter", "pin", "sql", "--replicas", "all")
    assert run("adapter", "unpin", "sql").out == "sql is no longer pinned\n"
    assert fake_cluster.adapters["sql"].pin_replicas == 0
    assert run("adapter", "unpin", "sql").out == "sql is not pinned\n"
    assert run("adapter", "unpin", "sql", "--json").json()["changed"] is False
    assert "pinned   to" not in run("adapter", "show", "sql").out


def test_what_is_no_number_of_workers_or_no_adapter_is_refused(run):
    ran = run("adapter", "pin", "sql", "--replicas", "0")
    assert (ran.code, "number of workers" in ran.err) == (2, True)
    ran = run("adapter", "pin", "other")
    assert (ran.code, "no adapter other" in ran.err) == (1, True)


def test_prefetching_leaves_the_worker_to_the_router_unless_told(run, fake_cluster):
    assert run("adapter", "prefetch", "sql").out == "sql: on its way to w0\n"
    asked = fake_cluster.steered[-1]
    assert (asked.name, asked.worker_id, asked.num_workers, asked.to_device) == ("sql", "", 1, False)
    assert run("adapter", "prefetch", "sql", "--worker", "w7", "--device").out == "sql: on its way to w7\n"
    assert (fake_cluster.steered[-1].worker_id, fake_cluster.steered[-1].to_device) == ("w7", True)


def test_prefetching_tells_of_each_worker_and_fails_where_one_refuses(run):
    ran = run("adapter", "prefetch", "sql", "--replicas", "3")
    assert (ran.code, ran.err) == (1, "w2: the disk is full\n")
    assert ran.out == "sql: on its way to w0\nsql: on its way to w1\n"
    outcomes = run("adapter", "prefetch", "sql", "--replicas", "3", "--json").json()["outcomes"]
    assert [outcome["error_reason"] for outcome in outcomes] == ["", "", "NO_SPACE"]


def test_waiting_for_the_device_tells_where_it_came_from_and_how_long_it_took(run, fake_cluster):
    assert run("adapter", "prefetch", "sql", "--wait").out == "sql: loaded on w0 from disk in 20.0 ms\n"
    assert fake_cluster.steered[-1].num_workers == 1


def test_unloading_tells_where_it_was(run, fake_cluster):
    assert run("adapter", "unload", "sql", "--from-disk").out == "sql: unloaded from w0, was on device\n"
    assert fake_cluster.steered[-1].from_disk
    ran = run("adapter", "unload", "nowhere")
    assert (ran.code, ran.out, ran.err) == (0, "", "no worker holds nowhere\n")
    ran = run("adapter", "unload", "pinned")
    assert (ran.code, "it is pinned" in ran.err) == (1, True)


def test_workers_tell_their_tiers_and_what_is_pinned_or_refused(run):
    out = run("worker", "list").out
    assert "device 1.5 MB/64.0 MB (1/32), disk 2.0 kB/1.0 GB" in out
    assert "bad (disk, pinned, refused: CORRUPT_ARTIFACT)" in out
    (worker,) = run("worker", "list", "--json").json()["workers"]
    assert worker["disk_tier"] == {"used_bytes": 2000, "budget_bytes": 10**9, "num_adapters": 0, "max_adapters": 0}
    assert worker["host_tier"] is None
    assert worker["adapters"][1]["quarantine_end_time"] == "1970-01-01T00:01:00+00:00"


def test_advice_is_told_with_its_reasons_and_its_figures_as_json(run, fake_cluster):
    rows = [line.split() for line in run("advice").out.splitlines()]
    assert rows[1:] == [
        ["promote", "sql", "-", "it", "waits"],
        ["throttle", "all", "of", "acme", "-", "it", "displaces"],
        ["merge", "sql", "w0", "it", "is", "most"],
    ]
    told = run("advice", "--json").json()["advice"]
    assert (told[0]["kind"], told[0]["figures"]) == ("promote", {"cold_ratio": 0.5})
    fake_cluster.adapters.clear()
    assert run("advice").err == "nothing to advise\n"
