"""`loraplex adapter pin` and `unpin` against a fake cluster."""

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
    assert f"pinned   on {replicas} of the base's workers" in run("adapter", "show", "sql").out
    assert run("adapter", "list", "--json").json()["adapters"][0]["pin_replicas"] == stored


def test_unpinning_tells_whether_it_was(run, fake_cluster):
    run("adapter", "pin", "sql", "--replicas", "all")
    assert run("adapter", "unpin", "sql").out == "sql is no longer pinned\n"
    assert fake_cluster.adapters["sql"].pin_replicas == 0
    assert run("adapter", "unpin", "sql").out == "sql is not pinned\n"
    assert run("adapter", "unpin", "sql", "--json").json()["changed"] is False
    assert "pinned   on" not in run("adapter", "show", "sql").out


def test_what_is_no_number_of_workers_or_no_adapter_is_refused(run):
    ran = run("adapter", "pin", "sql", "--replicas", "0")
    assert (ran.code, "number of workers" in ran.err) == (2, True)
    ran = run("adapter", "pin", "other")
    assert (ran.code, "no adapter other" in ran.err) == (1, True)
