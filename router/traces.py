"""What the router's spans say of a request: the server span of a front, and the span of each call to a worker."""

from __future__ import annotations

from typing import Final

from opentelemetry.trace import Span

from common import tracing
from common.trace_messages import recorded_messages
from loraplex.types.v1 import generation_pb2
from router.catalog import Resolved

METHOD: Final = "loraplex.worker.v1.WorkerService/Generate"


def name_request(request_id: str, model: str, operation: str) -> None:
    """Say on the server span what is asked for; `operation` is chat or text_completion."""
    tracing.current().set_attributes(
        {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "loraplex",
            "gen_ai.request.model": model,
            "loraplex.request.id": request_id,
        }
    )


def describe_request(resolved: Resolved) -> None:
    """Say on the server span which weights the model's name means."""
    span = tracing.current()
    span.set_attribute("loraplex.base.digest", resolved.base_digest)
    if resolved.version is not None:
        span.set_attribute("loraplex.adapter.version_digest", resolved.version.version_digest)
        span.set_attribute("loraplex.adapter.artifact_digest", resolved.version.artifact_digest)


def describe_usage(prompt_tokens: int, completion_tokens: int) -> None:
    """Say on the server span what is charged."""
    tracing.current().set_attributes(
        {"gen_ai.usage.input_tokens": prompt_tokens, "gen_ai.usage.output_tokens": completion_tokens}
    )


def add_spans(finished: generation_pb2.Finished) -> None:
    """Add this router's spans to the worker's, where the caller asked for them."""
    if tracing.is_recorded():
        del finished.spans[tracing.MAX_SPANS :]
        finished.spans.extend(recorded_messages())


class CallTrace:
    """The span of one call to a worker, ended once; also tells the server span above it what the worker said."""

    def __init__(self, worker_id: str, attempt: int) -> None:
        self._server = tracing.current()
        self._span: Span = tracing.start_client(
            METHOD,
            {
                "rpc.system.name": "grpc",
                "rpc.method": METHOD,
                "loraplex.worker.id": worker_id,
                "loraplex.attempt": attempt,
            },
        )
        self._is_recording = self._span.is_recording()

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return what makes the worker's span a child of this one."""
        return tracing.outgoing(self._span, ask=True)

    def finished(self, finished: generation_pb2.Finished) -> None:
        """Note the worker's last event; the call has ended well."""
        if not self._is_recording:
            return
        facts, usage = finished.facts, finished.usage
        if facts.tier_hit:
            tier = generation_pb2.AdapterTier.Name(facts.tier_hit).removeprefix("ADAPTER_TIER_").lower()
            for span in (self._span, self._server):
                span.set_attribute("loraplex.adapter.tier", tier)
        self._span.set_attribute("gen_ai.usage.input_tokens", usage.prompt_tokens)
        self._span.set_attribute("gen_ai.usage.output_tokens", usage.completion_tokens)
        self.end()

    def end(self, error: BaseException | None = None) -> None:
        """Note the end, and the exception that was it. Only the first call counts."""
        if self._is_recording:
            self._is_recording = False
            if error is not None:
                tracing.mark(self._span, error)
            self._span.end()
