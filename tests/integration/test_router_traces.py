"""What a router's spans tell of placement and of a second try, as its caller sees them in `Finished`."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from loraplex.errors import Draining
from loraplex.metadata_keys import TRACE_KEY
from loraplex.types.v1 import trace_pb2
from tests.integration.router_fakes import (
    BASE_ID,
    Event,
    FakeRegistry,
    FakeWorker,
    base_entry,
    choice_finished,
    delta,
    finished,
    running_router,
)

ASKING = ((TRACE_KEY, "1"),)
CALL = "loraplex.worker.v1.WorkerService/Generate"


@pytest.fixture
async def registry() -> AsyncIterator[FakeRegistry]:
    fake = await FakeRegistry(base_entry()).start()
    yield fake
    await fake.stop()


def by_name(spans: list[trace_pb2.Span], name: str) -> list[trace_pb2.Span]:
    return [span for span in spans if span.name == name]


async def test_each_try_is_a_span_and_the_failed_one_says_why(registry: FakeRegistry) -> None:
    asked: list[str] = []

    async def once(worker: FakeWorker, request) -> AsyncIterator[Event]:
        asked.append(worker.worker_id)
        if len(asked) == 1:
            raise Draining("the worker leaves")
        yield delta("x")
        yield choice_finished()
        yield finished(worker, request, 1, 1)

    workers = [await FakeWorker(worker_id=name, script=once).start() for name in ("w1", "w2")]
    try:
        async with running_router(registry.address, *(worker.address for worker in workers)) as router:
            events = await router.generate(BASE_ID, metadata=ASKING)
    finally:
        for worker in workers:
            await worker.stop()
    spans = list(events[-1].finished.spans)
    (server,) = by_name(spans, "loraplex.router.v1.InferenceService/Generate")
    first, second = by_name(spans, CALL)
    assert [span.attributes["loraplex.worker.id"] for span in (first, second)] == asked
    assert [span.attributes["loraplex.attempt"] for span in (first, second)] == ["1", "2"]
    assert (first.status, first.status_reason) == (trace_pb2.SPAN_STATUS_ERROR, "DRAINING")
    assert second.status == trace_pb2.SPAN_STATUS_UNSPECIFIED
    assert [span.attributes["loraplex.worker.id"] for span in by_name(spans, "placement")] == asked
    assert {span.parent_span_id for span in (first, second)} == {server.span_id}
    told = [dict(each.metadata[0]) for worker in asked for each in workers if each.worker_id == worker]
    assert [metadata["traceparent"].split("-")[2] for metadata in told] == [first.span_id, second.span_id]
    assert all(metadata[TRACE_KEY] == "1" for metadata in told)


async def test_nobody_asks_the_worker_for_spans_unless_the_client_does(registry: FakeRegistry) -> None:
    worker = await FakeWorker().start()
    try:
        async with running_router(registry.address, worker.address) as router:
            events = await router.generate(BASE_ID, metadata=(("tracestate", "a=b"),))
    finally:
        await worker.stop()
    assert not events[-1].finished.spans
    assert TRACE_KEY not in worker.metadata[0]
    assert worker.metadata[0]["traceparent"].endswith("-00")  # for the logs


async def test_a_worker_cannot_flood_the_client_with_spans(registry: FakeRegistry) -> None:
    async def flooding(worker: FakeWorker, request) -> AsyncIterator[Event]:
        yield choice_finished()
        end = finished(worker, request, 1, 1)
        end.finished.spans.extend(trace_pb2.Span(name=f"{i}") for i in range(1000))
        yield end

    worker = await FakeWorker(script=flooding).start()
    try:
        async with running_router(registry.address, worker.address) as router:
            spans = (await router.generate(BASE_ID, metadata=ASKING))[-1].finished.spans
    finally:
        await worker.stop()
    assert sum(span.service == "" for span in spans) == 64
    assert len(spans) < 64 + 10
