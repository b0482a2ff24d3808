"""Traces: one OpenTelemetry trace per request, across every process it passes.

Spans are made where an endpoint is configured (they are exported), or where a caller asked to see its own request's
(they are recorded in memory, see `recorded`). Everywhere else a request only passes its caller's W3C context on, or
ids of its own for the logs, and no span is made.

The current span is that of the running task. A server span stays current until its task ends, as each request has its
own. Attributes are OpenTelemetry's names (`gen_ai.*`, `rpc.*`, `http.*`, `error.type`) and `loraplex.*`; never prompts
or answers, nor messages of errors, which may quote what a client sent: an error is told by its stable reason.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from opentelemetry import context as otel
from opentelemetry import trace
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace import Span as SdkSpan
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Decision, Sampler, SamplingResult
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, SpanKind, StatusCode, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from common.trace_export import Export
from loraplex.errors import Cancelled, LoraplexError
from loraplex.metadata_keys import TRACE_KEY

MAX_SPANS: Final = 64
"""Spans of one request that one process records for its caller."""
CANCELLED: Final = Cancelled.reason
_LIMITS: Final = SpanLimits(
    max_attributes=32, max_attribute_length=256, max_span_attribute_length=256, max_events=8, max_links=1
)
_RECORDER: Final = otel.create_key("loraplex-recorder")
_PROPAGATOR: Final = TraceContextTextMapPropagator()
_IDS: Final = RandomIdGenerator()

Attributes = Mapping[str, AttributeValue]


class Recorder:
    """The spans of one request in this process that its caller wants to see, in the order in which they began."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def add(self, span: ReadableSpan) -> None:
        """Keep a span, unless there are MAX_SPANS already."""
        if len(self.spans) < MAX_SPANS:
            self.spans.append(span)


def _recorder(context: otel.Context | None = None) -> Recorder | None:
    found = otel.get_value(_RECORDER, context)
    return found if isinstance(found, Recorder) else None


class _RecordingProcessor(SpanProcessor):
    """Gives each span that begins to the recorder of its request."""

    def on_start(self, span: SdkSpan, parent_context: otel.Context | None = None) -> None:
        """See SpanProcessor."""
        recorder = _recorder(parent_context)
        if recorder is not None:
            recorder.add(span)


class _Sampler(Sampler):
    """Samples what is to be exported; what only its caller wants to see is recorded and not exported."""

    def __init__(self, exported: Sampler) -> None:
        self._exported = exported

    def should_sample(
        self,
        parent_context: otel.Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes | None = None,
        links: object = None,
        trace_state: trace.TraceState | None = None,
    ) -> SamplingResult:
        """See Sampler."""
        del links, trace_state
        result = self._exported.should_sample(parent_context, trace_id, name, kind, attributes)
        if result.decision is Decision.DROP and _recorder(parent_context) is not None:
            return SamplingResult(Decision.RECORD_ONLY, attributes, result.trace_state)
        return result

    def get_description(self) -> str:
        """See Sampler."""
        return f"Loraplex({self._exported.get_description()})"


class Tracing:
    """A process's spans: who makes them and where they go. `instance` tells processes of one service apart."""

    def __init__(self, service: str, endpoint: str | None = None, instance: str | None = None) -> None:
        self.service = service
        self._export = Export(endpoint) if endpoint else None
        facts = {
            "service.name": f"loraplex-{service}",
            "service.namespace": "loraplex",
            "service.instance.id": instance or f"{socket.gethostname()}:{os.getpid()}",
        }
        provider = TracerProvider(
            sampler=None if self._export else ALWAYS_OFF,  # None: by OTEL_TRACES_SAMPLER, else what the caller samples
            resource=OTELResourceDetector().detect().merge(Resource(facts)),
            span_limits=_LIMITS,
            shutdown_on_exit=False,
        )
        provider.sampler = _Sampler(provider.sampler)
        provider.add_span_processor(_RecordingProcessor())
        if self._export is not None:
            provider.add_span_processor(self._export.processor)
        self._tracer = provider.get_tracer("loraplex")

    def start(self, name: str, context: otel.Context, kind: SpanKind, attributes: Attributes | None) -> Span:
        """Start a span below the context's. Where nobody would see it, only its ids: the caller's, or fresh ones."""
        if self._export is None and _recorder(context) is None:
            caller = trace.get_current_span(context).get_span_context()
            return NonRecordingSpan(caller if caller.is_valid else _fresh_ids())
        return self._tracer.start_span(name, context, kind, attributes)

    def start_at(self, name: str, context: otel.Context, start_ns: int, attributes: Attributes | None) -> Span:
        """Start a span that began at `start_ns`, in nanoseconds since the epoch."""
        return self._tracer.start_span(name, context, attributes=attributes, start_time=start_ns)

    def close(self) -> None:
        """Send what is left, within trace_export.FLUSH_S."""
        if self._export is not None:
            self._export.close()


_process = Tracing("loraplex")


@contextmanager
def tracing(service: str, endpoint: str | None, *, instance: str | None = None) -> Iterator[None]:
    """Trace this process in the block, as `service`; its end waits for the last spans for a bounded time.

    `endpoint` is an OTLP/gRPC receiver, as http://HOST:PORT; None exports nothing.
    """
    global _process  # as with logs, there is one destination per process
    before, _process = _process, Tracing(service, endpoint, instance)
    try:
        yield
    finally:
        ended, _process = _process, before
        ended.close()


def service_name() -> str:
    """Return what this process calls itself."""
    return _process.service


def begin_request(name: str, carrier: Mapping[str, str], attributes: Attributes | None = None) -> Span:
    """Start a request's server span below the caller's context in `carrier` and make it current until the task ends.

    `carrier` maps lower-case names to values: traceparent, tracestate, and TRACE_KEY where the caller may ask for its
    spans. The caller ends the span.
    """
    context = _PROPAGATOR.extract(carrier, context=otel.Context())
    if carrier.get(TRACE_KEY) == "1":
        context = otel.set_value(_RECORDER, Recorder(), context)
    span = _process.start(name, context, SpanKind.SERVER, attributes)
    otel.attach(trace.set_span_in_context(span, context))
    return span


def current() -> Span:
    """Return the span of the running task; one that records nothing where there is none."""
    return trace.get_current_span()


@contextmanager
def span(name: str, attributes: Attributes | None = None) -> Iterator[Span]:
    """Make a part of the current span, and make it current; an exception that leaves marks it.

    For blocks that await, not for blocks that yield to another task.
    """
    if not current().is_recording():
        yield trace.INVALID_SPAN
        return
    part = _process.start(name, otel.get_current(), SpanKind.INTERNAL, attributes)
    token = otel.attach(trace.set_span_in_context(part))
    try:
        yield part
    except BaseException as error:
        mark(part, error)
        raise
    finally:
        otel.detach(token)
        part.end()


def start_client(name: str, attributes: Attributes | None = None) -> Span:
    """Start the span of a call to another service, below the current span. The caller ends it."""
    if not current().is_recording():
        return NonRecordingSpan(current().get_span_context())
    return _process.start(name, otel.get_current(), SpanKind.CLIENT, attributes)


def add_part(parent: Span, name: str, start_ns: int, attributes: Attributes | None = None) -> Span:
    """Start a span below `parent`, which is or was recorded, that began at `start_ns`. The caller ends it.

    Times are nanoseconds since the epoch.
    """
    return _process.start_at(name, trace.set_span_in_context(parent), start_ns, attributes)


def outgoing(span: Span, *, ask: bool = False) -> tuple[tuple[str, str], ...]:
    """Return the metadata that make a call a child of `span`; `ask` hands on the caller's wish to see the spans."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
    if ask and is_recorded():
        carrier[TRACE_KEY] = "1"
    return tuple(carrier.items())


def is_recorded() -> bool:
    """Tell whether the caller of the current request wants to see its spans."""
    return _recorder() is not None


def recorded() -> list[ReadableSpan]:
    """Return the spans of the current request in this process, where its caller wants to see them."""
    recorder = _recorder()
    return list(recorder.spans) if recorder is not None else []


def mark(span: Span, error: BaseException) -> None:
    """Tell how a span ended badly: cancelled, or by the reason of an error. The first mark stays."""
    if not span.is_recording() or (isinstance(span, ReadableSpan) and span.status.status_code is StatusCode.ERROR):
        return
    if isinstance(error, asyncio.CancelledError | GeneratorExit | Cancelled):
        reason = CANCELLED
        span.set_attribute("loraplex.cancelled", True)
    elif isinstance(error, LoraplexError):
        reason = error.reason
    else:
        reason = type(error).__name__
    span.set_attribute("error.type", reason)
    span.set_status(StatusCode.ERROR, reason)


def _fresh_ids() -> SpanContext:
    return SpanContext(
        _IDS.generate_trace_id(), _IDS.generate_span_id(), is_remote=False, trace_flags=TraceFlags(TraceFlags.DEFAULT)
    )
