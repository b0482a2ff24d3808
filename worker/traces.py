"""What a worker's spans say of a request, and the engine's spans, which the front end makes from the engine's times.

The engine process knows nothing of traces: it tells durations on the clock that all processes of a machine share, and
they become spans here, when the request ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from opentelemetry.trace import Span

from common import tracing
from common.trace_messages import recorded_messages
from loraplex.types.v1 import generation_pb2
from worker.mailbox import Timing
from worker.requests import CheckedRequest

_NS: Final = 1_000_000_000


def describe_request(request: CheckedRequest, base_digest: str) -> None:
    """Say on the server span what is asked for."""
    span, sampling = tracing.current(), request.sampling
    if not span.is_recording():
        return
    span.set_attributes(
        {
            "gen_ai.provider.name": "loraplex",
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.choice.count": sampling.n,
            "loraplex.request.id": request.request_id,
            "loraplex.base.digest": base_digest,
        }
    )
    if request.adapter is not None:
        span.set_attribute("loraplex.adapter.version_digest", request.adapter.version_digest)
        span.set_attribute("loraplex.adapter.artifact_digest", request.adapter.artifact_digest)


def describe_answer(finished: generation_pb2.Finished) -> None:
    """Say on the server span how the request was served, and give the spans to the caller that asked for them."""
    span, facts, usage = tracing.current(), finished.facts, finished.usage
    if not span.is_recording():
        return
    queue_s, load_s, prefill_s, decode_s = (
        duration.ToNanoseconds() / _NS
        for duration in (facts.queue_time, facts.adapter_load_time, facts.prefill_time, facts.decode_time)
    )
    first_s = queue_s + load_s + prefill_s
    span.set_attributes(
        {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.latency.time_in_queue": queue_s,
            "gen_ai.latency.time_in_model_prefill": prefill_s,
            "gen_ai.latency.time_in_model_decode": decode_s,
            "gen_ai.latency.time_to_first_token": first_s,
            "gen_ai.latency.e2e": first_s + decode_s,
            "loraplex.latency.adapter_load": load_s,
            "loraplex.worker.id": facts.worker_id,
        }
    )
    if facts.tier_hit:
        tier = generation_pb2.AdapterTier.Name(facts.tier_hit).removeprefix("ADAPTER_TIER_").lower()
        span.set_attribute("loraplex.adapter.tier", tier)
    finished.spans.extend(recorded_messages())


class EngineTrace:
    """The engine's part of one RPC: a block from its submission to its end. What leaves the block early marks it.

    `arrival_s` is time.monotonic() when the RPC came, from which the engine counts; `timing_so_far` is None until a
    token has come. Makes no span current, so the block may yield.
    """

    def __init__(self, arrival_s: float, timing_so_far: Callable[[], Timing | None]) -> None:
        self._parent = tracing.current()
        self._is_recording = self._parent.is_recording()
        self._arrival_s = arrival_s
        self._timing_so_far = timing_so_far
        self._submitted_s = time.monotonic()
        self._epoch_ns = time.time_ns() - int(self._submitted_s * _NS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._tell(self._timing_so_far(), error)

    def finished(self, timing: Timing) -> None:
        """Note the end of all choices: `timing` is that until the first token, and of the longest decode."""
        self._tell(timing, None)

    def _tell(self, timing: Timing | None, error: BaseException | None) -> None:
        if not self._is_recording:
            return
        self._is_recording = False
        end_s = time.monotonic()
        if timing is not None:
            admitted_s = self._arrival_s + timing.queue_s + timing.adapter_load_s
            first_token_s = admitted_s + timing.prefill_s
            end_s = first_token_s + timing.decode_s
        engine = self._part(self._parent, "engine", self._submitted_s)
        if timing is not None:
            queue = self._part(engine, "engine.queue", self._submitted_s)
            if timing.adapter_load_s > 0:
                ready_s = self._arrival_s + timing.adapter_ready_s
                load = self._part(queue, "engine.adapter_load", ready_s - timing.adapter_load_s)
                self._end(load, ready_s)
            self._end(queue, admitted_s)
            self._end(self._part(engine, "engine.prefill", admitted_s), first_token_s)
            self._end(self._part(engine, "engine.decode", first_token_s), end_s, error)
        self._end(engine, end_s, error)

    def _part(self, parent: Span, name: str, start_s: float) -> Span:
        return tracing.add_part(parent, name, self._wall_ns(start_s))

    def _end(self, span: Span, end_s: float, error: BaseException | None = None) -> None:
        if error is not None:
            tracing.mark(span, error)
        span.end(self._wall_ns(end_s))

    def _wall_ns(self, at_s: float) -> int:
        """Return nanoseconds since the epoch; nothing of the engine's began before it was asked."""
        return self._epoch_ns + int(max(at_s, self._submitted_s) * _NS)
