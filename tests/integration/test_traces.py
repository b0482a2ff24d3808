"""One request, one trace: registry, router and worker as real processes, a tiny real model, and a real receiver."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import httpx2
import pytest
from grpc import aio

from common.rpc import open_channel
from loraplex.router.v1 import inference_pb2, inference_pb2_grpc
from loraplex.types.v1 import generation_pb2, sampling_pb2
from tests.e2e.local_cluster import LocalCluster, local_cluster
from tests.otlp_collector import Collector, Received, running_collector
from tests.tiny_adapters import write_adapter
from tests.tiny_base import write_tiny_base

SECRET = "zanzibar"
ENDLESS = 8000
"""Tokens of a stream whose end no test sees."""
PARENT = "00f067aa0ba902b7"
GENERATE = "loraplex.router.v1.InferenceService/Generate"
CALL = "loraplex.worker.v1.WorkerService/Generate"
DOWNLOAD = "loraplex.registry.v1.AdapterService/DownloadArtifact"
ROUTER, WORKER, REGISTRY = "loraplex-router", "loraplex-worker", "loraplex-registry"


@dataclass(frozen=True)
class Traced:
    """A cluster whose processes export to a collector."""

    cluster: LocalCluster
    collector: Collector

    @property
    def http(self) -> str:
        return str(self.cluster.ready["http"])

    def channel(self) -> aio.Channel:
        return open_channel(self.cluster.ready["router"])


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    root = tmp_path_factory.mktemp("traced")
    base = write_tiny_base(root / "tiny", max_position_embeddings=8192)  # so that streams can last for seconds
    with pytest.MonkeyPatch.context() as patch, running_collector() as collector:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        with local_cluster(base) as cluster:
            for seed, name in enumerate(("first", "second", "third")):
                folder = write_adapter(root / name, base, rank=4, seed=seed)
                added = cluster.run("adapter", "add", name, folder)
                assert added.code == 0, added.err
            yield Traced(cluster, collector)
        everything = b"".join(collector.raw)
    assert everything
    assert SECRET.encode() not in everything


def fresh() -> tuple[str, tuple[tuple[str, str], ...]]:
    """A caller's trace id, and the metadata that carry it."""
    trace_id = secrets.token_hex(16)
    return trace_id, (("traceparent", f"00-{trace_id}-{PARENT}-01"),)


def request(model: str, **sampling: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        model=model, prompt=SECRET, sampling=sampling_pb2.SamplingParams(temperature=0, **sampling)
    )


def has(*names: str, service: str = ROUTER) -> Any:
    """The wish for all of these spans, the server span of `service` among them."""
    return lambda spans: {each.name for each in spans} >= set(names) and any(each.service == service for each in spans)


def tree(spans: list[Received]) -> dict[tuple[str, str, int], tuple[str, str, int] | None]:
    """Each span's (service, name, kind) with its parent's; None is the caller."""
    keys = {each.span.span_id: (each.service, each.name, each.span.kind) for each in spans}
    assert len(keys) == len(spans) == len(set(keys.values()))
    parents = {each.span.span_id: each.span.parent_span_id for each in spans}
    assert [parent.hex() for parent in parents.values() if parent not in keys] == [PARENT]
    return {keys[own]: keys.get(parent) for own, parent in parents.items()}


def expected_tree(server: str, *, fetched: bool) -> dict[Any, Any]:
    internal, front, client = 1, (ROUTER, server, 2), (ROUTER, CALL, 3)
    work, engine = (WORKER, CALL, 2), (WORKER, "engine", internal)
    fetch, queue = (WORKER, "adapter.fetch", internal), (WORKER, "engine.queue", internal)
    wanted = {
        front: None,
        (ROUTER, "resolve", internal): front,
        (ROUTER, "placement", internal): front,
        client: front,
        work: client,
        (WORKER, "tokenize", internal): work,
        fetch: work,
        engine: work,
        queue: engine,
        (WORKER, "engine.prefill", internal): engine,
        (WORKER, "engine.decode", internal): engine,
    }
    if fetched:
        wanted |= {
            (WORKER, DOWNLOAD, 3): fetch,
            (REGISTRY, DOWNLOAD, 2): (WORKER, DOWNLOAD, 3),
            (WORKER, "engine.adapter_load", internal): queue,
        }
    return wanted


def check_times(spans: list[Received]) -> None:
    """Children lie within their parents, up to what two ways to measure differ; parts of the engine in their order.

    Who serves a call may close its span long after its caller has the whole answer, and closed its own.
    """
    by_id = {each.span.span_id: each.span for each in spans}
    services = {each.span.span_id: each.service for each in spans}
    slack_ns = 5_000_000
    for each in spans:
        assert each.span.end_time_unix_nano >= each.span.start_time_unix_nano
        parent = by_id.get(each.span.parent_span_id)
        if parent is not None and each.service == ROUTER:
            assert each.span.start_time_unix_nano >= parent.start_time_unix_nano
        if parent is not None and each.service != REGISTRY:
            assert each.span.start_time_unix_nano >= parent.start_time_unix_nano - slack_ns, each.name
        if parent is not None and services[each.span.parent_span_id] == each.service:
            assert each.span.end_time_unix_nano <= parent.end_time_unix_nano + slack_ns, each.name
    named = {each.name: each.span for each in spans if each.service == WORKER}
    assert named["tokenize"].end_time_unix_nano <= named["engine"].start_time_unix_nano
    assert named["engine.queue"].end_time_unix_nano <= named["engine.prefill"].start_time_unix_nano
    assert named["engine.prefill"].end_time_unix_nano == named["engine.decode"].start_time_unix_nano


ALL = ("resolve", "placement", CALL, "tokenize", "adapter.fetch", "engine.decode")


async def test_a_grpc_request_is_one_trace_below_its_caller(traced: Traced) -> None:
    trace_id, metadata = fresh()
    async with traced.channel() as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        events = [
            event async for event in stub.Generate(request("first", max_tokens=20), timeout=60, metadata=metadata)
        ]
    finished = events[-1].finished
    assert not finished.spans  # nobody asked
    spans = await asyncio.to_thread(
        traced.collector.wait_for, trace_id, has(GENERATE, DOWNLOAD, *ALL, service=REGISTRY)
    )
    spans = await asyncio.to_thread(traced.collector.wait_for, trace_id, lambda found: len(found) >= 14)
    assert tree(spans) == expected_tree(GENERATE, fetched=True)
    check_times(spans)
    assert {each.error for each in spans} == {""}
    by_key = {(each.service, each.name): each for each in spans}
    front, work = by_key[ROUTER, GENERATE].attributes, by_key[WORKER, CALL].attributes
    assert front["gen_ai.request.model"] == "first"
    for attributes in (front, work):
        assert attributes["gen_ai.usage.input_tokens"] == finished.usage.prompt_tokens
        assert attributes["gen_ai.usage.output_tokens"] == 20
        assert attributes["loraplex.base.digest"] == finished.facts.base_digest
        assert attributes["loraplex.adapter.version_digest"] == finished.facts.version_digest
        assert attributes["loraplex.adapter.artifact_digest"] == finished.facts.artifact_digest
        assert attributes["loraplex.adapter.tier"] == "source"
    decode_s = finished.facts.decode_time.ToNanoseconds() / 1e9
    assert work["gen_ai.latency.time_in_model_decode"] == pytest.approx(decode_s)
    decode = by_key[WORKER, "engine.decode"].span
    assert (decode.end_time_unix_nano - decode.start_time_unix_nano) / 1e9 == pytest.approx(decode_s, abs=1e-6)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_http_request_is_one_trace_below_its_caller(traced: Traced, stream: bool) -> None:
    trace_id, metadata = fresh()
    body = {"model": "second" if stream else "third", "prompt": SECRET, "max_tokens": 5, "stream": stream}
    async with httpx2.AsyncClient(timeout=60) as http:
        answer = await http.post(f"{traced.http}/v1/completions", json=body, headers=dict(metadata))
    assert answer.status_code == 200
    spans = await asyncio.to_thread(traced.collector.wait_for, trace_id, lambda found: len(found) >= 14)
    assert tree(spans) == expected_tree("POST /v1/completions", fetched=True)
    check_times(spans)
    front = next(each for each in spans if each.name == "POST /v1/completions")
    assert front.attributes["http.response.status_code"] == 200
    assert front.attributes["gen_ai.operation.name"] == "text_completion"
    assert front.attributes["gen_ai.usage.output_tokens"] == 5


async def test_without_a_caller_the_router_begins_the_trace(traced: Traced) -> None:
    before = len(traced.collector.received)
    async with httpx2.AsyncClient(timeout=60) as http:
        await http.post(f"{traced.http}/v1/completions", json={"model": "tiny", "prompt": SECRET, "max_tokens": 1})

    def roots() -> list[Received]:
        new = traced.collector.received[before:]
        return [each for each in new if not each.span.parent_span_id and each.service == ROUTER]

    async with asyncio.timeout(60):
        while not roots():  # noqa: ASYNC110 - the receiver lives in another thread
            await asyncio.sleep(0.05)
    assert [each.name for each in roots()] == ["POST /v1/completions"]


async def test_a_request_whose_client_goes_is_marked_from_the_front_to_the_engine(traced: Traced) -> None:
    trace_id, metadata = fresh()
    async with traced.channel() as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(request("tiny", max_tokens=ENDLESS, ignore_eos=True), timeout=60, metadata=metadata)
        await call.read()
        call.cancel()
    spans = await asyncio.to_thread(traced.collector.wait_for, trace_id, has(GENERATE, CALL, "engine.decode"))
    spans = await asyncio.to_thread(traced.collector.wait_for, trace_id, lambda found: len(found) >= 9)
    marked = {(each.service, each.name) for each in spans if each.is_cancelled}
    assert marked == {(ROUTER, GENERATE), (ROUTER, CALL), (WORKER, CALL), (WORKER, "engine"), (WORKER, "engine.decode")}
    assert {each.error for each in spans} == {"", "CANCELLED"}


async def test_an_http_client_that_goes_is_marked_too(traced: Traced) -> None:
    trace_id, metadata = fresh()
    body = {"model": "tiny", "prompt": SECRET, "max_tokens": ENDLESS, "stream": True, "ignore_eos": True}
    async with (
        httpx2.AsyncClient(timeout=60) as http,
        http.stream("POST", f"{traced.http}/v1/completions", json=body, headers=dict(metadata)) as answer,
    ):
        await anext(answer.aiter_bytes())
    spans = await asyncio.to_thread(traced.collector.wait_for, trace_id, has("POST /v1/completions", "engine.decode"))
    assert {each.name for each in spans if each.service == ROUTER and each.is_cancelled} == {
        "POST /v1/completions",
        CALL,
    }


async def test_a_request_that_the_worker_refuses_is_marked_on_both_sides(traced: Traced) -> None:
    trace_id, metadata = fresh()
    async with traced.channel() as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        long = inference_pb2.GenerateRequest(model="tiny", prompt=SECRET * 2000)
        with pytest.raises(grpc.RpcError):
            await stub.Generate(long, timeout=60, metadata=metadata).read()
    spans = await asyncio.to_thread(traced.collector.wait_for, trace_id, has(GENERATE, CALL, "tokenize"))
    spans = await asyncio.to_thread(traced.collector.wait_for, trace_id, lambda found: len(found) >= 6)
    marked = {(each.service, each.name): each.error for each in spans if each.error}
    reason = "PROMPT_TOO_LONG"
    assert marked == {
        (ROUTER, GENERATE): reason,
        (ROUTER, CALL): reason,
        (WORKER, CALL): reason,
        (WORKER, "tokenize"): reason,
    }
    assert not any(each.is_cancelled for each in spans)
    failed = next(line for line in logged(traced, "worker-0") if line.get("trace_id") == trace_id)
    assert failed["event"] == "generate.failed"
    server = next(each for each in spans if (each.service, each.name) == (WORKER, CALL))
    assert failed["span_id"] == server.span.span_id.hex()


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({"model": f"{SECRET}-model", "prompt": "x"}, 404, "MODEL_NOT_FOUND"),
        ({"model": "tiny", "prompt": SECRET, "temperature": -1}, 400, "INVALID_PARAMETER"),
    ],
)
async def test_a_request_that_is_refused_is_marked_by_its_reason(
    traced: Traced, body: dict[str, Any], status: int, reason: str
) -> None:
    trace_id, metadata = fresh()
    if status == 404:
        body = body | {"model": "unknown"}
    async with httpx2.AsyncClient(timeout=60) as http:
        answer = await http.post(f"{traced.http}/v1/completions", json=body, headers=dict(metadata))
    assert answer.status_code == status
    spans = await asyncio.to_thread(traced.collector.wait_for, trace_id, has("POST /v1/completions"))
    front = next(each for each in spans if each.name == "POST /v1/completions")
    assert front.error == front.attributes["error.type"] == reason
    assert front.attributes["http.response.status_code"] == status


async def test_chat_prompts_stay_out_as_well(traced: Traced) -> None:
    trace_id, metadata = fresh()
    async with traced.channel() as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        chat = generation_pb2.ChatInput(messages=[generation_pb2.ChatMessage(role=SECRET, content=SECRET)])
        bad = inference_pb2.GenerateRequest(model="tiny", chat=chat)
        with pytest.raises(grpc.RpcError):
            await stub.Generate(bad, timeout=60, metadata=metadata).read()
    await asyncio.to_thread(traced.collector.wait_for, trace_id, has(GENERATE))  # the fixture looks for the secret


def test_the_command_line_prints_the_tree(traced: Traced) -> None:
    ran = traced.cluster.run("generate", "first", SECRET, "--raw", "--max-tokens", "8", "--trace")
    assert ran.code == 0, ran.err
    lines = ran.err.splitlines()
    assert re.match(r"trace [0-9a-f]{32} +where +start +took", lines[0])
    assert [re.split(r"  +", line.strip(" │"))[0:2] for line in lines[1:]] == [
        [GENERATE, "router"],
        ["├─ resolve", "router"],
        ["├─ placement", "router"],
        [f"└─ {CALL}", "router"],
        [f"└─ {CALL}", "worker"],
        ["├─ tokenize", "worker"],
        ["├─ adapter.fetch", "worker"],
        ["└─ engine", "worker"],
        ["├─ engine.queue", "worker"],
        ["├─ engine.prefill", "worker"],
        ["└─ engine.decode", "worker"],
    ]
    assert all(re.search(r" \+\d+\.\d+ m?s +\d+\.\d+ m?s", line) for line in lines[1:])
    assert SECRET not in ran.err


def test_the_command_lines_json_carries_the_spans_where_they_are_asked_for(traced: Traced) -> None:
    asked = traced.cluster.run("generate", "tiny", SECRET, "--raw", "--max-tokens", "2", "--trace", "--json").json()
    assert {(span["service"], span["name"]) for span in asked["spans"]} >= {("router", GENERATE), ("worker", CALL)}
    assert len({span["trace_id"] for span in asked["spans"]}) == 1
    silent = traced.cluster.run("generate", "tiny", SECRET, "--raw", "--max-tokens", "2", "--json").json()
    assert "spans" not in silent


def logged(traced: Traced, name: str) -> list[dict[str, Any]]:
    text = (traced.cluster.state_dir / "logs" / f"{name}.log").read_text()
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_the_clusters_logs_hold_no_complaint_about_traces(traced: Traced) -> None:
    for name in ("registry", "router", "worker-0"):
        assert not [line for line in logged(traced, name) if "traces." in line["event"] or "opentelemetry" in str(line)]
