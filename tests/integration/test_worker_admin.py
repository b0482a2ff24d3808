"""A worker's admin port around a real engine process (without a model): readiness, metrics, what is held."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.admin_ports import taken_admin_ports
from tests.tiny_base import write_tiny_base
from tests.worker_front import ArtifactServer, running_front, serving_artifacts

BLOB = b"an adapter that the fake engine does not read" * 100
DIGEST = hashlib.sha256(BLOB).hexdigest()


@pytest.fixture
def ports(monkeypatch) -> list[int]:
    """Admin ports of the workers that were started, which each take a free one."""
    return taken_admin_ports(monkeypatch, "worker")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_tiny_base(tmp_path_factory.mktemp("admin") / "base")


class Admin:
    def __init__(self, http: httpx2.AsyncClient) -> None:
        self.http = http

    async def resources(self) -> dict[str, int]:
        held: dict[str, int] = (await self.http.get("/debug/resources")).json()
        return held

    async def until(self, wanted: Callable[[dict[str, int]], bool]) -> dict[str, int]:
        async with asyncio.timeout(30):
            while not wanted(held := await self.resources()):  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.02)
        return held

    async def metrics(self) -> dict[str, dict[tuple[str, ...], float]]:
        """The samples by name and label values."""
        samples: dict[str, dict[tuple[str, ...], float]] = {}
        for family in text_string_to_metric_families((await self.http.get("/metrics")).text):
            for sample in family.samples:
                samples.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
        return samples


async def test_what_a_request_holds_shows_while_it_runs_and_is_gone_after_it_was_left(base, tmp_path, ports):
    artifacts = ArtifactServer()  # type: ignore[abstract]  # it serves downloads alone
    artifacts.add(BLOB)
    told = {"STEP_S": "0.01", "TOTAL_BLOCKS": "1024", "CONTEXT": "4096"}
    async with (
        serving_artifacts(artifacts) as registry_port,
        running_front(base, tmp_path, registry_port=registry_port, environment=told, max_resident_adapters=7) as front,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{ports[0]}", timeout=30) as http,
    ):
        admin = Admin(http)
        assert (await http.get("/readyz")).status_code == 200
        idle = await admin.resources()
        calls = [front.stub.Generate(front.request(artifact=DIGEST, max_tokens=4000)) for _ in range(3)]
        for call in calls:
            await call.read()
        held = await admin.until(lambda held: held["running_requests"] == 3)
        assert held["kv_blocks_in_use"] > 0
        assert held["adapter_references"] == 6  # three in the engine, three leases in the front end
        assert held["streams"] == 3
        assert held["tasks"] >= 3
        busy = await admin.metrics()
        assert busy["vllm:num_requests_running"][()] == 3
        assert busy["vllm:num_requests_waiting"][()] == 0
        assert 0 < busy["vllm:kv_cache_usage_perc"][()] <= 1
        assert list(busy["vllm:lora_requests_info"]) == [("7", DIGEST, "")]
        assert busy["loraplex_worker_resident_adapters"][()] == 1
        assert busy["loraplex_worker_cache_bytes"][()] == len(BLOB)
        assert busy["loraplex_worker_state"][("serving",)] == 1
        for call in calls:
            call.cancel()
        zero = ("kv_blocks_in_use", "adapter_references", "streams", "tasks", "running_requests", "waiting_requests")
        await admin.until(
            lambda held: (
                not any(held[name] for name in zero) and held["all_tasks"] <= idle["all_tasks"] + 2
            )  # the connection that asks
        )
        assert (await admin.metrics())["loraplex_worker_requests_total"] == {("cancelled", ""): 3}


async def test_a_complete_answer_is_measured_and_the_tiers_are_told_apart(base, tmp_path, ports):
    artifacts = ArtifactServer()  # type: ignore[abstract]  # it serves downloads alone
    artifacts.add(BLOB)
    async with (
        serving_artifacts(artifacts) as registry_port,
        running_front(base, tmp_path, registry_port=registry_port) as front,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{ports[0]}", timeout=30) as http,
    ):
        for _ in range(2):
            assert (await front.generate(front.request([5, 6, 7], artifact=DIGEST, max_tokens=4))).finished
        answer = await front.generate(front.request([5, 6, 7], max_tokens=4))
        tokens = 2 * 4 + len(answer.token_ids())
        await Admin(http).until(lambda held: held["streams"] == 0)  # a client has its answer before gRPC tells us so
        seen = await Admin(http).metrics()
    assert seen["loraplex_worker_requests_total"] == {("ok", ""): 3}
    assert seen["loraplex_worker_prompt_tokens_total"][()] == 9
    assert seen["loraplex_worker_generation_tokens_total"][()] == tokens
    assert seen["loraplex_worker_adapter_requests_total"] == {("source",): 1, ("device",): 1}
    assert list(seen["loraplex_worker_adapter_load_seconds_count"].items()) == [(("source",), 1)]
    for name in ("time_to_first_token", "inter_token", "request"):
        assert seen[f"loraplex_worker_{name}_seconds_count"][()] == 3
        assert seen[f"loraplex_worker_{name}_seconds_sum"][()] > 0
    slowest, all_steps = (seen[f"loraplex_worker_{name}"][()] for name in ("slowest_step_seconds", "step_seconds_sum"))
    assert seen["loraplex_worker_step_seconds_count"][()] == 12  # one per token
    assert all_steps / 12 <= slowest < all_steps
    assert seen["loraplex_rpc_requests_total"][("OK", "/loraplex.worker.v1.WorkerService/Generate")] == 3
    assert seen["loraplex_worker_engine_restarts_total"][()] == 0


@pytest.mark.parametrize("prefix_cache", [True, False])
async def test_a_prompt_that_begins_as_an_earlier_one_did_is_computed_in_part_and_says_so(
    base, tmp_path, ports, prefix_cache
):
    prompt = list(range(5, 45))  # two blocks of 16 tokens and 8 more
    async with (
        running_front(base, tmp_path, prefix_cache=prefix_cache) as front,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{ports[0]}", timeout=30) as http,
    ):
        first = await front.generate(front.request(prompt, max_tokens=4))
        again = await front.generate(front.request(prompt, max_tokens=4))
        held = await Admin(http).until(lambda held: held["streams"] == held["kv_blocks_in_use"] == 0)
        seen = await Admin(http).metrics()
    cached = 32 if prefix_cache else 0
    assert (first.finished.usage.cached_tokens, again.finished.usage.cached_tokens) == (0, cached)
    assert first.token_ids() == again.token_ids()
    assert held["idle_prefix_blocks"] == cached // 16  # what is kept for later requests is no leak
    assert seen["loraplex_worker_cached_prompt_tokens_total"][()] == cached
    assert seen["loraplex_worker_arena_chunks"] == {
        ("kv",): 0,
        ("adapter",): 0,
        ("idle_prefix",): cached // 16,
        ("free",): 64 - cached // 16,
    }


async def test_the_admin_port_answers_before_the_worker_is_ready(base, tmp_path, ports):
    async with (
        running_front(base, tmp_path, wait_ready=False, environment={"START_S": "0.2"}),
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{ports[0]}", timeout=30) as http,
    ):
        assert (await http.get("/livez")).status_code == 200
        first = await http.get("/readyz")
        if first.status_code == 503:  # a fast machine may be ready by now
            assert first.text.startswith("starting")
        async with asyncio.timeout(60):
            while (await http.get("/readyz")).status_code != 200:  # noqa: ASYNC110 - probes are polled
                await asyncio.sleep(0.02)
