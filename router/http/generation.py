"""POST /v1/chat/completions and /v1/completions: one ASGI endpoint from the body's first byte to the answer's last.

Owns the order of things: nothing is sent before every prompt's first event is there, so that an error until then has
a real status; afterwards an error is one `error` event and no [DONE]. A client that leaves cancels the worker's call.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import structlog
from starlette.types import Receive, Scope, Send

from common import tracing
from loraplex.errors import DeadlineExceeded, LoraplexError
from loraplex.metadata_keys import AUTHORIZATION_KEY, MIN_REVISION_KEY, REQUEST_ID_KEY
from loraplex.types.v1 import generation_pb2
from loraplex.worker.v1 import worker_pb2
from router.access import Access
from router.catalog import Resolved
from router.forward import Job, WorkerStream
from router.http.answers import DONE, Answer, Head, Total, finish_reason
from router.http.errors import error_answer, error_object
from router.http.facts import fact_headers, facts_object, fingerprint
from router.http.traces import HttpTrace
from router.http.translate import Plan
from router.http.wire import BodyLimits, ClientGone, header, parse_json, read_body, send_answer, until_client_leaves
from router.inference import Inference, request_id_from
from router.metrics import Observation
from router.traces import describe_usage, name_request

log = structlog.get_logger(__name__)

_SEND_GRACE_S: Final = 5.0
_JSON: Final = (b"content-type", b"application/json")
_SSE: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


@dataclass(slots=True)
class _Choice:
    """What one choice has gathered, for an answer that does not stream."""

    texts: list[str] = field(default_factory=list)
    positions: list[generation_pb2.PositionLogprobs] = field(default_factory=list)
    reason: str = "stop"


@dataclass(slots=True)
class _Exchange:
    """One HTTP request under way."""

    plan: Plan
    tenant: str
    request_id: str
    min_revision: str | None
    observation: Observation
    send: Send
    has_started: bool = False


class GenerationEndpoint:
    """An ASGI application for one endpoint: `plan` reads its bodies, `answer` forms its answers."""

    def __init__(
        self,
        inference: Inference,
        access: Access,
        plan: Callable[[Mapping[str, Any]], Plan],
        answer: Callable[[Head], Answer],
        body: BodyLimits,
    ) -> None:
        self._inference = inference
        self._access = access
        self._plan = plan
        self._answer = answer
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        with HttpTrace(scope, send) as trace:
            await self._answer_one(scope, receive, trace.send, trace)

    async def _answer_one(self, scope: Scope, receive: Receive, send: Send, trace: HttpTrace) -> None:
        request_id = request_id_from(None)
        try:
            with self._inference.observed("http") as observation:
                request_id = request_id_from(header(scope, REQUEST_ID_KEY))
                tenant = self._access.client(header(scope, AUTHORIZATION_KEY))
                plan = self._plan(parse_json(await read_body(receive, self._body)))
                name_request(request_id, plan.model, trace.operation)
                with self._inference.admitted(tenant, len(plan.requests)):
                    exchange = _Exchange(plan, tenant, request_id, header(scope, MIN_REVISION_KEY), observation, send)
                    await until_client_leaves(receive, self._serve(exchange))
        except ClientGone as error:
            trace.failed(error)
            log.debug("http.client_gone", request_id=request_id)
        except LoraplexError as error:
            trace.failed(error)
            await send_answer(send, *error_answer(error, request_id))
        except Exception as error:
            trace.failed(error)
            log.exception("http.unexpected", request_id=request_id, exc_info=error)
            opaque = LoraplexError("internal error; the server's log has the details")
            await send_answer(send, *error_answer(opaque, request_id))

    async def _serve(self, exchange: _Exchange) -> None:
        """Answer, or raise LoraplexError while nothing was sent."""
        inference, plan = self._inference, exchange.plan
        deadline_s = inference.deadline_s(None)
        try:
            # The calls below have the deadline themselves; this one is for a client that reads too slowly.
            async with asyncio.timeout(inference.request_timeout_s + _SEND_GRACE_S):
                resolved = await inference.resolve(exchange.tenant, plan.model, exchange.min_revision)
                jobs = [
                    Job(_job_id(exchange, number), exchange.tenant, resolved, request, deadline_s)
                    for number, request in enumerate(plan.requests)
                ]
                streams = await inference.open_all(jobs, plan.names.told)
                try:
                    exchange.observation.first_event()
                    await self._relay(exchange, resolved, streams)
                finally:
                    for stream in streams:
                        stream.close()
        except TimeoutError:
            error = DeadlineExceeded("the request's time ran out")
            exchange.observation.failed(error)
            tracing.mark(tracing.current(), error)
            if not exchange.has_started:
                raise error from None

    async def _relay(self, exchange: _Exchange, resolved: Resolved, streams: Sequence[WorkerStream]) -> None:
        plan = exchange.plan
        answer = self._answer(
            Head(
                exchange.request_id,
                int(time.time()),
                plan.model,
                fingerprint(resolved),
                plan.include_usage,
                plan.has_logprobs,
            )
        )
        headers = fact_headers(resolved, [stream.worker_id for stream in streams], exchange.request_id)
        if not plan.stream:
            try:
                body = await _gather(plan, answer, streams, exchange.observation)
            except LoraplexError as broken:
                raise plan.names.told(broken) from None
            exchange.has_started = True
            await send_answer(exchange.send, 200, [_JSON, *headers], body)
            return
        exchange.has_started = True
        await exchange.send({"type": "http.response.start", "status": 200, "headers": [*_SSE, *headers]})
        try:
            async for piece in _pieces(plan, answer, streams, exchange.observation):
                await exchange.send({"type": "http.response.body", "body": piece, "more_body": True})
        except LoraplexError as broken:
            error = plan.names.told(broken)
            exchange.observation.failed(error)
            tracing.mark(tracing.current(), error)
            log.warning("http.broken_stream", request_id=exchange.request_id, reason=error.reason, error=str(error))
            event = f"event: error\ndata: {json.dumps(error_object(error))}\n\n".encode()
            await exchange.send({"type": "http.response.body", "body": event, "more_body": True})
        await exchange.send({"type": "http.response.body", "body": b""})


def _job_id(exchange: _Exchange, number: int) -> str:
    if len(exchange.plan.requests) == 1:
        return exchange.request_id
    return f"{exchange.request_id[:120]}.{number}"


async def _pieces(
    plan: Plan, answer: Answer, streams: Sequence[WorkerStream], observation: Observation
) -> AsyncIterator[bytes]:
    """Yield the bytes of a stream. The last choice's end waits for the serving facts that go with it."""
    total = Total()
    facts: dict[int, generation_pb2.ServingFacts] = {}
    opened: set[int] = set()
    num_running = plan.num_choices * len(streams)
    last: tuple[int, str] | None = None
    async for prompt, event in merged(streams):
        match event.WhichOneof("event"):
            case "delta":
                delta = event.delta
                if not delta.text and not delta.logprobs:
                    continue  # half a character so far
                index = prompt * plan.num_choices + delta.index
                piece = answer.delta(index, delta)
                if index not in opened:
                    opened.add(index)
                    piece = answer.opening(index) + piece
                yield piece
            case "choice_finished":
                index = prompt * plan.num_choices + event.choice_finished.index
                reason = finish_reason(event.choice_finished)
                opening = b"" if index in opened else answer.opening(index)
                num_running -= 1
                if num_running == 0 and not plan.include_usage:
                    last = index, reason
                    piece = opening
                else:
                    piece = opening + answer.finish(index, reason, None)
                if piece:
                    yield piece
            case "finished":
                total.add(event.finished.usage)
                facts[prompt] = event.finished.facts
            case _:
                pass
    observation.usage(total.prompt_tokens, total.completion_tokens)
    describe_usage(total.prompt_tokens, total.completion_tokens)
    served = facts_object([facts[prompt] for prompt in sorted(facts)])
    end = answer.usage(total, served) if plan.include_usage else b""
    if last is not None:
        end = answer.finish(*last, served) + end
    yield end + DONE


async def _gather(plan: Plan, answer: Answer, streams: Sequence[WorkerStream], observation: Observation) -> bytes:
    """Return the body of an answer that does not stream."""
    total = Total()
    facts: dict[int, generation_pb2.ServingFacts] = {}
    choices = [_Choice() for _ in range(plan.num_choices * len(streams))]
    async for prompt, event in merged(streams):
        match event.WhichOneof("event"):
            case "delta":
                choice = choices[prompt * plan.num_choices + event.delta.index]
                choice.texts.append(event.delta.text)
                choice.positions.extend(event.delta.logprobs)
            case "choice_finished":
                choice = choices[prompt * plan.num_choices + event.choice_finished.index]
                choice.reason = finish_reason(event.choice_finished)
            case "finished":
                total.add(event.finished.usage)
                facts[prompt] = event.finished.facts
            case _:
                pass
    observation.usage(total.prompt_tokens, total.completion_tokens)
    describe_usage(total.prompt_tokens, total.completion_tokens)
    whole = [
        answer.choice(index, "".join(choice.texts), choice.positions, choice.reason)
        for index, choice in enumerate(choices)
    ]
    return answer.whole(whole, total, facts_object([facts[prompt] for prompt in sorted(facts)]))


async def merged(streams: Sequence[WorkerStream]) -> AsyncIterator[tuple[int, worker_pb2.GenerateResponse]]:
    """Yield (number of the stream, event) as events come, in order within each stream."""
    if len(streams) == 1:
        async for event in streams[0]:
            yield 0, event
        return

    async def next_of(number: int) -> worker_pb2.GenerateResponse | None:
        return await anext(streams[number], None)

    reading = {asyncio.create_task(next_of(number)): number for number in range(len(streams))}
    try:
        while reading:
            done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number = reading.pop(task)
                if (following := task.result()) is not None:
                    yield number, following
                    reading[asyncio.create_task(next_of(number))] = number
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
