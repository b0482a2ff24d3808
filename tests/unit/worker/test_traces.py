"""The engine's spans: right times and parents, from nothing but the durations that the mailbox carries."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
from opentelemetry import context as otel

from common import tracing
from common.trace_messages import recorded_messages
from loraplex.errors import EngineDown
from loraplex.metadata_keys import TRACE_KEY
from loraplex.types.v1 import trace_pb2
from worker.mailbox import Timing
from worker.traces import EngineTrace

NS = 1_000_000_000


@pytest.fixture(autouse=True)
def own_context() -> Iterator[None]:
    token = otel.attach(otel.Context())
    yield
    otel.detach(token)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The machine's monotonic clock, 1 000 000 s behind the wall clock."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "time_ns", lambda: int((now[0] + 1_000_000) * NS))
    return now


def told() -> dict[str, tuple[float, float, str]]:
    """Each span's begin and end on the monotonic clock, and its parent."""
    messages = recorded_messages()
    names = {message.span_id: message.name for message in messages}
    return {
        message.name: (
            round(message.start_time.ToNanoseconds() / NS - 1_000_000, 6),
            round((message.start_time.ToNanoseconds() + message.duration.ToNanoseconds()) / NS - 1_000_000, 6),
            names.get(message.parent_span_id, ""),
        )
        for message in messages
        if message.name != "server"
    }


def _run_until(clock: list[float], at_s: float, error: BaseException) -> None:
    clock[0] = at_s
    raise error


def test_spans_lie_where_the_engine_spent_the_time(clock: list[float]) -> None:
    tracing.begin_request("server", {TRACE_KEY: "1"})
    clock[0] = 100.5  # tokenized and fetched; the RPC had come at 100.0
    with EngineTrace(100.0, lambda: None) as engine:
        clock[0] = 109.0  # the last message is read late
        # Admitted at 101.9: waited 1.0, of it 0.5 before it was submitted, and 0.9 for a load that ended at 101.7.
        engine.finished(Timing(1.0, 0.9, 0.3, 4.0, adapter_on_device=False, adapter_ready_s=1.7))
    assert told() == {
        "engine": (100.5, 106.2, "server"),
        "engine.queue": (100.5, 101.9, "engine"),
        "engine.adapter_load": (100.8, 101.7, "engine.queue"),
        "engine.prefill": (101.9, 102.2, "engine"),
        "engine.decode": (102.2, 106.2, "engine"),
    }


def test_an_adapter_that_was_there_has_no_load(clock: list[float]) -> None:
    tracing.begin_request("server", {TRACE_KEY: "1"})
    with EngineTrace(100.0, lambda: None) as engine:
        engine.finished(Timing(0.25, 0.0, 0.5, 1.0, adapter_on_device=True))
    assert list(told()) == ["engine", "engine.queue", "engine.prefill", "engine.decode"]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (asyncio.CancelledError(), trace_pb2.SPAN_STATUS_CANCELLED),
        (GeneratorExit(), trace_pb2.SPAN_STATUS_CANCELLED),
        (EngineDown("gone"), trace_pb2.SPAN_STATUS_ERROR),
    ],
)
def test_what_ends_in_decoding_is_marked_there_and_until_then_all_is_well(
    clock: list[float], error: BaseException, status: int
) -> None:
    tracing.begin_request("server", {TRACE_KEY: "1"})
    so_far = Timing(0.25, 0.0, 0.5, 2.0, adapter_on_device=True)
    with pytest.raises(type(error)), EngineTrace(100.0, lambda: so_far):
        _run_until(clock, 103.0, error)
    assert told()["engine.decode"] == (100.75, 102.75, "engine")
    statuses = {message.name: message.status for message in recorded_messages()}
    assert statuses == {"server": 0, "engine": status, "engine.queue": 0, "engine.prefill": 0, "engine.decode": status}


def test_what_ends_before_the_first_token_is_marked_as_a_whole(clock: list[float]) -> None:
    tracing.begin_request("server", {TRACE_KEY: "1"})
    with pytest.raises(asyncio.CancelledError), EngineTrace(100.0, lambda: None):
        _run_until(clock, 103.0, asyncio.CancelledError())
    assert told() == {"engine": (100.0, 103.0, "server")}
    assert recorded_messages()[1].status == trace_pb2.SPAN_STATUS_CANCELLED


def test_a_request_nobody_watches_makes_no_spans() -> None:
    tracing.begin_request("server", {})
    with EngineTrace(time.monotonic(), lambda: None) as engine:
        engine.finished(Timing(0.0, 0.0, 0.0, 0.0, adapter_on_device=True))
    assert recorded_messages() == []
