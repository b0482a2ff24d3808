"""`loraplex up --dedicated`: one adapter's requests go to a worker of its own, merged; all others go elsewhere."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from loraplex.client import Client, Completion, Sampling, gather
from loraplex.errors import NotServedHere, from_rpc_error
from loraplex.worker.v1.worker_pb2 import GenerateRequest
from loraplex.worker.v1.worker_pb2_grpc import WorkerServiceStub
from tests.e2e.local_cluster import LocalCluster, local_cluster
from tests.tiny_adapters import write_adapter

PROMPTS = ("hello", "SELECT 1", "abc abc abc")
OWN, OTHER, BASE = "all-seven", "attention", "tiny"


def answers(cluster: LocalCluster, model: str) -> list[Completion]:
    greedy = Sampling(temperature=0.0, max_tokens=24, ignore_eos=True)
    with Client(cluster.ready["router"], cluster.ready["registry"]) as client:
        return [gather(client.generate(model, prompt, sampling=greedy)) for prompt in PROMPTS]


@pytest.mark.timeout(600)
def test_answers_are_the_adapters_and_nothing_else_is_served_there(
    tiny_base: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    state = ("--state", str(tmp_path / "state"))
    with local_cluster(tiny_base, *state) as shared:
        for name in (OWN, OTHER):
            assert shared.run("adapter", "add", name, adapters[name], "--quantization", "none").code == 0
        beside = {model: answers(shared, model) for model in (OWN, OTHER, BASE)}

    with local_cluster(tiny_base, *state, "--dedicated", OWN) as cluster:
        workers = {worker["worker_id"]: worker for worker in cluster.run("worker", "list", "--json").json()["workers"]}
        assert set(workers) == {"worker-0", "dedicated-0"}
        found = {model: answers(cluster, model) for model in (OWN, OTHER, BASE)}
        for model, expected in beside.items():
            assert [one.text for one in found[model]] == [one.text for one in expected]
            home = "dedicated-0" if model == OWN else "worker-0"
            assert {one.facts.worker_id for one in found[model]} == {home}
        facts, before = found[OWN][0].facts, beside[OWN][0].facts
        assert (facts.artifact_digest, facts.version_digest, facts.base_digest) == (
            before.artifact_digest,
            before.version_digest,
            before.base_digest,
        )
        assert {one.facts.tier_hit for one in found[OWN]} == {"device"}
        assert workers["dedicated-0"]["dedicated_artifact_digest"] == facts.artifact_digest
        assert workers["worker-0"]["dedicated_artifact_digest"] == ""
        assert f"{OWN} (device, merged)" in cluster.run("worker", "list").out

        with grpc.insecure_channel(workers["dedicated-0"]["address"]) as channel:
            asked = GenerateRequest(request_id="direct", base_digest=facts.base_digest, prompt="hello")
            with pytest.raises(grpc.RpcError) as refused:
                list(WorkerServiceStub(channel).Generate(asked, timeout=60))
            assert isinstance(from_rpc_error(refused.value), NotServedHere)

        changed = write_adapter(tmp_path / "changed", tiny_base, rank=4, seed=9)
        assert cluster.run("adapter", "add", OWN, changed, "--quantization", "none").code == 0
        assert {one.facts.worker_id for one in answers(cluster, OWN)} == {"worker-0"}  # the new version
        old = answers(cluster, f"{OWN}@{facts.artifact_digest[:12]}")
        assert {one.facts.worker_id for one in old} == {"dedicated-0"}
        assert [one.text for one in old] == [one.text for one in beside[OWN]]


def test_a_name_that_nobody_has_ends_the_start_with_what_to_do(tiny_base: Path) -> None:
    with local_cluster(tiny_base, "--dedicated", "nobody") as cluster:
        assert cluster.process.wait(120) == 1
