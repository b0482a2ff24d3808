"""Spans: whose child a request is, what is recorded, what a mark says, and how a process ends its traces."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import structlog
from opentelemetry import context as otel
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode

from common import trace_export, tracing
from common.telemetry import add_trace_ids
from common.trace_messages import recorded_messages
from loraplex.errors import PromptTooLong
from loraplex.metadata_keys import TRACE_KEY
from loraplex.types.v1 import trace_pb2
from tests.otlp_collector import running_collector

CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
UNSAMPLED = CALLER[:-2] + "00"


@pytest.fixture(autouse=True)
def own_context() -> Iterator[None]:
    """A server span stays current until its task ends; here every test is such a task."""
    token = otel.attach(otel.Context())
    yield
    otel.detach(token)


def ids(span: Any) -> tuple[str, str]:
    context = span.get_span_context()
    return f"{context.trace_id:032x}", f"{context.span_id:016x}"


def test_a_request_nobody_watches_passes_its_callers_context_on_unchanged() -> None:
    span = tracing.begin_request("x", {"traceparent": CALLER, "tracestate": "a=b"})
    assert not span.is_recording()
    assert dict(tracing.outgoing(tracing.start_client("y"))) == {"traceparent": CALLER, "tracestate": "a=b"}


def test_a_request_without_context_gets_ids_for_the_logs_that_sample_nothing() -> None:
    span = tracing.begin_request("x", {})
    line = add_trace_ids(None, "info", {"event": "e"})
    assert (line["trace_id"], line["span_id"]) == ids(span)
    assert dict(tracing.outgoing(span))["traceparent"] == f"00-{line['trace_id']}-{line['span_id']}-00"


def test_log_lines_without_a_request_carry_no_ids() -> None:
    assert add_trace_ids(None, "info", {"event": "e"}) == {"event": "e"}


def test_log_lines_carry_the_innermost_spans_ids(capsys: pytest.CaptureFixture[str]) -> None:
    tracing.begin_request("x", {TRACE_KEY: "1"})
    with tracing.span("inner") as inner, structlog.testing.capture_logs([add_trace_ids]) as lines:
        structlog.get_logger().info("hello")
    assert (lines[0]["trace_id"], lines[0]["span_id"]) == ids(inner)


@pytest.mark.parametrize("bad", ["", "garbage", "00-" + "0" * 32 + "-00f067aa0ba902b7-01", CALLER + "x" * 1000])
def test_a_malformed_context_begins_a_trace_of_its_own(bad: str) -> None:
    span = tracing.begin_request("x", {"traceparent": bad})
    assert span.get_span_context().is_valid
    assert ids(span)[0] != CALLER.split("-")[1]


def test_what_a_caller_asks_for_is_recorded_below_its_context_but_not_sampled() -> None:
    server = tracing.begin_request("server", {"traceparent": UNSAMPLED, TRACE_KEY: "1"}, {"k": "v"})
    with tracing.span("part"):
        client = tracing.start_client("client", {"n": 3})
    told = {span.name: span for span in recorded_messages()}
    assert set(told) == {"server", "part", "client"}
    assert {span.trace_id for span in told.values()} == {CALLER.split("-")[1]}
    assert told["server"].parent_span_id == "00f067aa0ba902b7"
    assert told["part"].parent_span_id == told["server"].span_id
    assert told["client"].parent_span_id == told["part"].span_id
    assert told["server"].attributes == {"k": "v"}
    assert told["client"].attributes == {"n": "3"}
    out = dict(tracing.outgoing(client, ask=True))
    assert out["traceparent"] == f"00-{ids(client)[0]}-{ids(client)[1]}-00"
    assert out[TRACE_KEY] == "1"
    assert TRACE_KEY not in dict(tracing.outgoing(client))
    server.end()


def test_requests_with_one_trace_id_do_not_see_each_others_spans() -> None:
    async def request(name: str) -> list[str]:
        tracing.begin_request(name, {"traceparent": CALLER, TRACE_KEY: "1"})
        await asyncio.sleep(0)
        with tracing.span(f"{name}.part"):
            await asyncio.sleep(0)
        return [span.name for span in recorded_messages()]

    async def both() -> list[list[str]]:
        return await asyncio.gather(*(asyncio.create_task(request(name)) for name in "ab"))

    assert asyncio.run(both()) == [["a", "a.part"], ["b", "b.part"]]


def test_what_is_recorded_is_bounded_in_spans_and_in_size() -> None:
    tracing.begin_request("server", {TRACE_KEY: "1"}, {"long": "x" * 10_000} | {f"k{i}": i for i in range(100)})
    for i in range(500):
        with tracing.span(f"part {i}"):
            pass
    messages = recorded_messages()
    assert len(messages) == tracing.MAX_SPANS
    assert len(messages[0].attributes) == 32
    assert max(len(value) for value in messages[0].attributes.values()) <= 256


def test_any_other_value_of_the_key_asks_for_nothing() -> None:
    tracing.begin_request("server", {TRACE_KEY: "yes"})
    assert not tracing.is_recorded()
    assert recorded_messages() == []


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (PromptTooLong("the prompt has 9 tokens: secret"), trace_pb2.SPAN_STATUS_ERROR, "PROMPT_TOO_LONG"),
        (asyncio.CancelledError("secret"), trace_pb2.SPAN_STATUS_CANCELLED, "CANCELLED"),
        (ZeroDivisionError("secret"), trace_pb2.SPAN_STATUS_ERROR, "ZeroDivisionError"),
    ],
)
def test_an_exception_marks_by_its_reason_and_never_by_its_words(
    error: BaseException, status: int, reason: str
) -> None:
    tracing.begin_request("server", {TRACE_KEY: "1"})
    with pytest.raises(type(error)), tracing.span("part"):
        raise error
    part = recorded_messages()[1]
    assert (part.status, part.status_reason, part.attributes["error.type"]) == (status, reason, reason)
    assert "secret" not in str(recorded_messages())
    span = tracing.recorded()[1]
    assert span.status.status_code is StatusCode.ERROR
    assert span.events == ()


def test_the_first_mark_stays() -> None:
    span = tracing.begin_request("server", {TRACE_KEY: "1"})
    tracing.mark(span, PromptTooLong("first"))
    tracing.mark(span, asyncio.CancelledError())
    assert recorded_messages()[0].status_reason == "PROMPT_TOO_LONG"


def test_a_span_of_the_past_keeps_its_times() -> None:
    server = tracing.begin_request("server", {TRACE_KEY: "1"})
    tracing.add_part(server, "past", 1_700_000_000_000_000_000).end(1_700_000_000_250_000_000)
    past = recorded_messages()[1]
    assert past.start_time.ToNanoseconds() == 1_700_000_000_000_000_000
    assert past.duration.ToNanoseconds() == 250_000_000
    assert past.parent_span_id == recorded_messages()[0].span_id


def test_with_an_endpoint_spans_arrive_with_the_services_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_export, "FLUSH_S", 60.0)
    with running_collector() as collector:
        with tracing.tracing("router", collector.endpoint, instance="r1"):
            span = tracing.begin_request("server", {"traceparent": CALLER}, {"k": "v"})
            with tracing.span("part"):
                pass
            span.end()
        spans = {each.name: each for each in collector.trace(CALLER.split("-")[1])}
    assert {each.service for each in spans.values()} == {"loraplex-router"}
    assert spans["server"].span.parent_span_id.hex() == "00f067aa0ba902b7"
    assert spans["part"].span.parent_span_id == spans["server"].span.span_id
    assert spans["server"].attributes == {"k": "v"}


def test_what_the_caller_does_not_sample_is_not_exported_though_it_may_see_it() -> None:
    with running_collector() as collector:
        with tracing.tracing("router", collector.endpoint):
            tracing.begin_request("server", {"traceparent": UNSAMPLED, TRACE_KEY: "1"}).end()
            assert [span.name for span in recorded_messages()] == ["server"]
        assert collector.calls == 0


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that is taken, so that nobody else comes to listen there, and that nobody listens at."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@pytest.mark.parametrize("kind", ["closed", "hangs", "refuses"])
def test_a_receiver_that_is_away_costs_one_warning_and_a_bounded_wait(
    kind: str, closed_port: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2" if kind != "hangs" else "60")
    with running_collector() as collector, structlog.testing.capture_logs() as lines:
        collector.refuses, collector.hangs = kind == "refuses", kind == "hangs"
        endpoint = f"http://127.0.0.1:{closed_port}" if kind == "closed" else collector.endpoint
        with tracing.tracing("router", endpoint):
            for _ in range(3):
                begun_s = time.perf_counter()
                for _ in range(50):
                    tracing.begin_request("server", {}).end()
                assert time.perf_counter() - begun_s < 12  # the request's thread never waits for the receiver
                threading.Event().wait(0.3)
            ending_s = time.monotonic()
        assert time.monotonic() - ending_s < trace_export.FLUSH_S + 10
    assert [line["event"] for line in lines if line["log_level"] != "info"] == ["traces.not_exported"]
    assert caplog.records == []


def test_a_receiver_that_comes_back_is_told_and_gets_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
    monkeypatch.setattr(trace_export, "FLUSH_S", 60.0)
    with running_collector() as collector, structlog.testing.capture_logs() as lines:
        collector.refuses, collector.refusal = True, grpc.StatusCode.PERMISSION_DENIED  # not tried again
        with tracing.tracing("router", collector.endpoint):
            tracing.begin_request("lost", {}).end()
            deadline = time.monotonic() + 60
            while not any(line["event"] == "traces.not_exported" for line in lines):
                assert time.monotonic() < deadline
                threading.Event().wait(0.02)
            collector.refuses = False
            tracing.begin_request("kept", {"traceparent": CALLER}).end()
            collector.wait_for(CALLER.split("-")[1], bool, 60)
    assert [line["event"] for line in lines] == ["traces.not_exported", "traces.exported_again"]


def test_recorded_spans_are_readable_while_open() -> None:
    span = tracing.begin_request("server", {TRACE_KEY: "1"})
    assert isinstance(span, ReadableSpan)
    (message,) = recorded_messages()
    assert message.duration.ToNanoseconds() >= 0
    assert message.service == "loraplex"
