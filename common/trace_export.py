"""Where spans go: to an OTLP/gRPC receiver, in batches, from a thread of their own.

A receiver that is away costs one warning and no request; what does not fit the queue is dropped by the SDK. Knows
nothing of requests.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Final

import structlog
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

log = structlog.get_logger(__name__)

FLUSH_S: Final = 2.0
"""How long the end of a process may wait for the last spans to go out."""
_CHATTY: Final = ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal")
"""Loggers that repeat with every batch what `_CalmExporter` says once."""


class _CalmExporter(SpanExporter):
    """Hands batches on; tells when the receiver goes and when it is back, not of every batch."""

    def __init__(self, inner: SpanExporter, endpoint: str) -> None:
        self._inner = inner
        self._endpoint = endpoint
        self._is_away = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch, within the exporter's time-out (OTEL_EXPORTER_OTLP_TIMEOUT, 10 s)."""
        result = self._inner.export(spans)
        is_away = result is not SpanExportResult.SUCCESS
        if is_away and not self._is_away:
            log.warning("traces.not_exported", endpoint=self._endpoint, meaning="the receiver does not take spans")
        elif self._is_away and not is_away:
            log.info("traces.exported_again", endpoint=self._endpoint)
        self._is_away = is_away
        return result

    def shutdown(self) -> None:
        """Close the connection; an export under way ends at once. May be called again."""
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """See SpanExporter."""
        return self._inner.force_flush(timeout_millis)


class Export:
    """A batch processor and its connection, from the first span to `close`."""

    def __init__(self, endpoint: str) -> None:
        # Costs 50 ms and more of import; a service that exports nothing does without.
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415

        for name in _CHATTY:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._exporter = _CalmExporter(OTLPSpanExporter(endpoint=endpoint), endpoint)
        self.processor: Final = BatchSpanProcessor(self._exporter)

    def close(self) -> None:
        """Send what is left, for FLUSH_S at most. Blocks."""
        cut = threading.Timer(FLUSH_S, self._exporter.shutdown)
        cut.daemon = True
        cut.start()
        try:
            self.processor.shutdown()  # type: ignore[no-untyped-call]
        finally:
            cut.cancel()
