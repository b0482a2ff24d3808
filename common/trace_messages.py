"""The recorded spans of a request as protobuf messages, for the caller that asked for them."""

from __future__ import annotations

import time

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode
from opentelemetry.trace.span import format_span_id, format_trace_id

from common import tracing
from loraplex.types.v1.trace_pb2 import Span, SpanStatus


def recorded_messages() -> list[Span]:
    """Return the current request's spans in this process, those still open as if they ended now."""
    now_ns = time.time_ns()
    return [_message(span, now_ns) for span in tracing.recorded()]


def _message(span: ReadableSpan, now_ns: int) -> Span:
    ids, parent = span.get_span_context(), span.parent
    assert ids is not None  # noqa: S101 - a started span has ids
    start_ns = span.start_time or now_ns
    message = Span(
        trace_id=format_trace_id(ids.trace_id),
        span_id=format_span_id(ids.span_id),
        parent_span_id=format_span_id(parent.span_id) if parent is not None else "",
        service=tracing.service_name(),
        name=span.name,
        attributes={key: _text(value) for key, value in (span.attributes or {}).items()},
    )
    message.start_time.FromNanoseconds(start_ns)
    message.duration.FromNanoseconds(max(0, (span.end_time or now_ns) - start_ns))
    if span.status.status_code is StatusCode.ERROR:
        message.status_reason = span.status.description or ""
        cancelled = message.status_reason == tracing.CANCELLED
        message.status = SpanStatus.SPAN_STATUS_CANCELLED if cancelled else SpanStatus.SPAN_STATUS_ERROR
    return message


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
