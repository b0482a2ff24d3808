"""`loraplex adapter evaluate` against a real cluster: what the worker measures, what the registry keeps and shows."""

from __future__ import annotations

import pytest

from loraplex.client import AsyncClient
from tests.e2e.local_cluster import LocalCluster

pytestmark = pytest.mark.timeout(240)


def evaluate(cluster: LocalCluster, name: str, *options: str):
    return cluster.run("adapter", "evaluate", name, "--json", *options).json()


def test_each_format_is_measured_kept_and_shown(cluster: LocalCluster) -> None:
    assert cluster.run("adapter", "repack", "attention", "--quantization", "none").code == 0
    exact = evaluate(cluster, "attention")
    assert (exact["format"], exact["top1_agreement"], exact["mean_kl"], exact["max_kl"]) == ("none", 1.0, 0.0, 0.0)
    assert exact["num_positions"] > exact["num_prompts"] > 80

    found = {}
    for form in ("int8", "int4"):
        assert cluster.run("adapter", "repack", "attention", "--quantization", form).code == 0
        found[form] = evaluate(cluster, "attention")
        assert (found[form]["format"], found[form]["device"]) == (form, "cpu float32")
        assert found[form]["num_positions"] == exact["num_positions"]
    assert 0 < found["int8"]["mean_kl"] < found["int4"]["mean_kl"]
    assert found["int4"]["top1_agreement"] < found["int8"]["top1_agreement"] <= 1
    assert evaluate(cluster, "attention", "--format", "none")["mean_kl"] == 0

    shown = cluster.run("adapter", "show", "attention", "--json").json()
    assert {entry["format"] for entry in shown["evaluations"]} == {"none", "int8", "int4"}
    assert found["int4"] in shown["evaluations"]
    text = cluster.run("adapter", "show", "attention").out
    assert f"{found['int4']['top1_agreement']:.2%} of {exact['num_positions']} tokens as exact" in text

    other = cluster.run("adapter", "evaluate", "attention", "--format", "int8")
    assert (other.code, "adapter repack" in other.err) == (1, True)
    nobody = cluster.run("adapter", "evaluate", "nobody")
    assert (nobody.code, "nobody" in nobody.err) == (1, True)


async def test_workers_and_the_router_hold_nothing_afterwards(cluster: LocalCluster) -> None:
    async with AsyncClient(cluster.ready["router"], cluster.ready["registry"]) as client:
        await client.evaluate_adapter("half")
        (worker,) = [worker async for worker in client.list_workers()]
        assert (worker.running_requests, worker.waiting_requests) == (0, 0)
        assert not any(adapter.in_flight for adapter in worker.adapters)
