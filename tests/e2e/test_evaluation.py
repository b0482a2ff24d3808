"""`loraplex adapter evaluate` against a real cluster: what the worker measures, what the registry keeps and shows."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.e2e.local_cluster import LocalCluster, loraplex

NAME = "attention"


def evaluate(cluster: LocalCluster, *options: str) -> Any:
    return loraplex("adapter", "evaluate", NAME, "--json", *options, env=cluster.env, timeout_s=150).json()


def holds_something(cluster: LocalCluster) -> bool:
    (worker,) = cluster.run("worker", "list", "--json").json()["workers"]
    counts = worker["running_requests"], worker["waiting_requests"]
    return counts != (0, 0) or any(adapter["in_flight"] for adapter in worker["adapters"])


@pytest.mark.timeout(600)
def test_each_format_is_measured_kept_and_shown_and_nothing_is_held_afterwards(cluster: LocalCluster) -> None:
    found = {"none": evaluate(cluster, "--quantization", "none")}
    exact = found["none"]
    assert (exact["format"], exact["top1_agreement"], exact["mean_kl"], exact["max_kl"]) == ("none", 1.0, 0.0, 0.0)
    assert exact["num_positions"] > exact["num_prompts"] > 80
    for form in ("int4", "int8"):
        assert cluster.run("adapter", "repack", NAME, "--quantization", form).code == 0
        found[form] = evaluate(cluster)
        assert (found[form]["format"], found[form]["device"]) == (form, "cpu float32")
        assert found[form]["num_positions"] == exact["num_positions"]
    assert 0 < found["int8"]["mean_kl"] < found["int4"]["mean_kl"]
    assert found["int4"]["top1_agreement"] < found["int8"]["top1_agreement"] <= 1

    shown = cluster.run("adapter", "show", NAME, "--json").json()
    assert [entry["format"] for entry in shown["evaluations"]] == ["int8", "int4", "none"]
    assert shown["evaluations"][0] == found["int8"]
    text = cluster.run("adapter", "show", NAME).out
    assert f"answers  {found['int8']['top1_agreement']:.2%} of {exact['num_positions']} tokens as exact" in text

    deadline = time.monotonic() + 60
    while holds_something(cluster):  # the router hears of the end a moment after its client
        assert time.monotonic() < deadline
