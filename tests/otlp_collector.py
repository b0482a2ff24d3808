"""An OTLP/gRPC receiver of traces: a real server that keeps what it is sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

ERROR = trace_pb2.Status.STATUS_CODE_ERROR


@dataclass(frozen=True)
class Received:
    """A span as it came over the wire, and the service it came from."""

    service: str
    span: trace_pb2.Span

    @property
    def name(self) -> str:
        return self.span.name

    @property
    def attributes(self) -> dict[str, Any]:
        return {
            entry.key: getattr(entry.value, kind)
            for entry in self.span.attributes
            if (kind := entry.value.WhichOneof("value")) is not None
        }

    @property
    def is_cancelled(self) -> bool:
        return self.span.status.code == ERROR and self.attributes.get("loraplex.cancelled") is True

    @property
    def error(self) -> str:
        return self.span.status.message if self.span.status.code == ERROR else ""


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps all spans by trace id. `refuses` answers with `refusal`; `hangs` does not answer until the server stops."""

    endpoint: str = ""
    refuses: bool = False
    refusal: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    hangs: bool = False
    received: list[Received] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    calls: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)
    stopped: threading.Event = field(default_factory=threading.Event)

    def Export(self, request, context):
        with self.changed:
            self.calls += 1
            self.changed.notify_all()
        if self.hangs:
            self.stopped.wait(30)
        if self.refuses:
            context.abort(self.refusal, "told to refuse")
        with self.changed:
            self.raw.append(request.SerializeToString())
            for resource in request.resource_spans:
                names = {entry.key: entry.value.string_value for entry in resource.resource.attributes}
                for scope in resource.scope_spans:
                    self.received += [Received(names["service.name"], span) for span in scope.spans]
            self.changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def trace(self, trace_id: str) -> list[Received]:
        with self.changed:
            return [each for each in self.received if each.span.trace_id.hex() == trace_id]

    def wait_for(
        self, trace_id: str, wanted: Callable[[list[Received]], bool], timeout_s: float = 60
    ) -> list[Received]:
        """Return the spans of a trace once they are as wanted."""
        deadline = time.monotonic() + timeout_s
        with self.changed:
            while not wanted(spans := self.trace(trace_id)):
                left = deadline - time.monotonic()
                assert left > 0, f"only {[(each.service, each.name) for each in spans]}"
                self.changed.wait(left)
        return spans


@contextmanager
def running_collector() -> Iterator[Collector]:
    collector = Collector()
    collector.changed = threading.Condition(threading.RLock())
    server = grpc.server(futures.ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        collector.stopped.set()
        server.stop(0).wait(5)
