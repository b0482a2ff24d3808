"""Opens one WorkerService.Generate for a request and relays its events.

Owns the choice to try another worker, which exists only before the first event, and the translation of a broken
connection into a typed error. Knows neither names nor fronts.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final

import structlog
from grpc import aio

from common import tracing
from loraplex import errors
from loraplex.metadata_keys import REQUEST_ID_KEY, STATUS_SEQUENCE_KEY
from loraplex.router.v1 import inference_pb2
from loraplex.types.v1 import generation_pb2
from loraplex.worker.v1 import worker_pb2
from router.catalog import Resolved, Version
from router.fleet import Fleet
from router.fleet_link import Flight
from router.placement import Pick, PlacementRequest, in_quarantine, is_warm, pick, prompt_tokens_on
from router.traces import CallTrace
from router.traffic import Traffic
from router.worker_errors import worker_error, worker_lost

log = structlog.get_logger(__name__)

_MAX_ATTEMPTS: Final = 2
_BYTES_PER_TOKEN: Final = 4  # of English text; an estimate for placement only
_TOKENS_PER_MESSAGE: Final = 8  # what a chat template puts around a turn


@dataclass(frozen=True, slots=True)
class Job:
    """One generation, resolved. `deadline_s` is on the forwarder's clock."""

    request_id: str
    tenant: str
    resolved: Resolved
    request: inference_pb2.GenerateRequest
    deadline_s: float


def estimated_prompt_tokens(request: inference_pb2.GenerateRequest) -> int:
    """Return about how many tokens the prompt has; exact where it came as tokens."""
    match request.WhichOneof("input"):
        case "tokens":
            return len(request.tokens.token_ids)
        case "chat":
            return sum(len(turn.content) // _BYTES_PER_TOKEN + _TOKENS_PER_MESSAGE for turn in request.chat.messages)
        case _:
            return len(request.prompt) // _BYTES_PER_TOKEN + 1


def to_worker_request(job: Job) -> worker_pb2.GenerateRequest:
    """Return what the worker is asked: the client's input and sampling, and the adapter by its digests."""
    request = worker_pb2.GenerateRequest(
        request_id=job.request_id, tenant=job.tenant, base_digest=job.resolved.base_digest
    )
    match job.request.WhichOneof("input"):
        case "tokens":
            request.tokens.CopyFrom(job.request.tokens)
        case "chat":
            request.chat.CopyFrom(job.request.chat)
        case _:
            request.prompt = job.request.prompt
    request.sampling.CopyFrom(job.request.sampling)
    if (version := job.resolved.version) is not None:
        request.adapter.CopyFrom(to_worker_adapter(version))
    return request


def to_worker_adapter(version: Version) -> worker_pb2.ResolvedAdapter:
    """Return an adapter as workers are told of it."""
    return worker_pb2.ResolvedAdapter(
        version_digest=version.version_digest,
        artifact_digest=version.artifact_digest,
        rank=version.rank,
        format=version.format,
        artifact_bytes=version.artifact_bytes,
    )


def is_retryable(error: errors.LoraplexError) -> bool:
    """Tell whether another worker may do better.

    It is unreachable, draining or broken, its queue, disk or device is full, or it cannot have the adapter: refuses it
    for a while, got or read a damaged file, or failed to load it.
    """
    return (
        isinstance(error, errors.Unavailable | errors.QueueFull | errors.NoSpace | errors.CorruptArtifact)
        or "quarantined" in error.metadata
        or error.metadata.get("stage") == "load"
    )


class WorkerStream:
    """The events of one generation from one worker. `close` is due exactly when the caller is done with it."""

    def __init__(
        self,
        call: aio.UnaryStreamCall[worker_pb2.GenerateRequest, worker_pb2.GenerateResponse],
        flight: Flight,
        worker_id: str,
        trace: CallTrace,
        on_close: Callable[[WorkerStream], None] = lambda _: None,
        on_finished: Callable[[generation_pb2.Finished], None] = lambda _: None,
    ) -> None:
        self._on_finished = on_finished
        self.worker_id = worker_id
        self._trace = trace
        self._on_close = on_close
        self._cut: errors.LoraplexError | None = None
        self._call = call
        self._flight = flight
        self._events: AsyncIterator[worker_pb2.GenerateResponse] = aiter(call)
        self._first: worker_pb2.GenerateResponse | None = None
        self._has_started = False
        self._has_finished = False

    async def start(self) -> None:
        """Wait for the first event and keep it. Raises a typed error when none comes."""
        try:
            metadata = await self._call.initial_metadata()
            self._flight.accepted(_sequence_of(metadata))
            self._first = await self._next()
        except asyncio.CancelledError:
            if self._cut is None:
                raise
            raise self._cut from None
        finally:
            self._has_started = self._first is not None

    def __aiter__(self) -> WorkerStream:
        return self

    async def __anext__(self) -> worker_pb2.GenerateResponse:
        """Return the next event. Raises WorkerLost when the worker goes away before the last."""
        if self._first is not None:
            event, self._first = self._first, None
        elif self._has_finished:
            with contextlib.suppress(aio.AioRpcError):
                await anext(self._events, None)  # the status; the answer is complete whatever it says
            raise StopAsyncIteration
        else:
            event = await self._next()
        if event.HasField("finished"):
            self._has_finished = True
            self._flight.end()
            self._trace.finished(event.finished)
            self._on_finished(event.finished)
        return event

    async def _next(self) -> worker_pb2.GenerateResponse:
        try:
            return await anext(self._events)
        except StopAsyncIteration:
            lost = worker_lost(self.worker_id, "the stream ended early", has_started=self._has_started)
            raise self._ended(lost) from None
        except aio.AioRpcError as error:
            raise self._ended(worker_error(error, self.worker_id, has_started=self._has_started)) from None
        except asyncio.CancelledError:
            if self._cut is None:
                raise
            raise self._ended(self._cut) from None

    def _ended(self, error: errors.LoraplexError) -> errors.LoraplexError:
        self._trace.end(error)
        return error

    def close(self) -> None:
        """Cancel what is left of the call, so that the worker frees the request within a step. May be called again."""
        self._flight.end()
        self._trace.end(errors.Cancelled("the request ended before the answer"))
        self._call.cancel()
        self._on_close(self)

    def cut(self, error: errors.LoraplexError) -> None:
        """End the stream: whoever reads it gets `error`."""
        self._cut = error
        self._call.cancel()


def _sequence_of(metadata: aio.Metadata) -> int | None:
    value = metadata.get(STATUS_SEQUENCE_KEY)
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else None


class Forwarder:
    """Places requests on the fleet. `on_retry` is told the reason whenever another worker is tried.

    `traffic` is told of every request, and of adapters that requests cannot wait for; it tells on how many workers an
    adapter shall be.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_retry: Callable[[str], None] = lambda _: None,
        traffic: Traffic | None = None,
    ) -> None:
        self._traffic = traffic or Traffic()
        self._fleet = fleet
        self._rng = rng or random.Random()  # noqa: S311 - breaks ties, guards nothing
        self._clock = clock
        self._on_retry = on_retry
        self._streams: set[WorkerStream] = set()
        self._cut: errors.LoraplexError | None = None

    def cut_all(self, error: errors.LoraplexError) -> None:
        """End every stream with `error`, and let no request begin any more."""
        self._cut = error
        for stream in list(self._streams):
            stream.cut(error)

    async def open(self, job: Job) -> WorkerStream:
        """Return a stream whose first event is there.

        Tries a second worker once where the first is unreachable, draining, broken or full, or cannot have the
        adapter, unless all that are left are known to refuse it. Raises NoWorker, DeadlineUnreachable,
        DeadlineExceeded, WorkerLost, and whatever the worker refuses with. The caller closes the stream.
        """
        placement = PlacementRequest(
            base_digest=job.resolved.base_digest,
            prompt_tokens=estimated_prompt_tokens(job.request),
            artifact_digest=job.resolved.version.artifact_digest if job.resolved.version else "",
            artifact_bytes=job.resolved.version.artifact_bytes if job.resolved.version else 0,
            replicas=self._traffic.replicas_of(job.resolved),
        )
        self._traffic.arrived(job.tenant, job.resolved, placement.prompt_tokens)
        request = to_worker_request(job)
        tried: list[str] = []
        failure: errors.LoraplexError | None = None
        while True:
            if self._cut is not None:
                raise self._cut
            remaining_s = job.deadline_s - self._clock()
            if remaining_s <= 0:
                if failure is not None:
                    raise failure
                raise errors.DeadlineExceeded("the request's deadline passed before a worker could answer")
            try:
                with tracing.span("placement") as span:
                    choice = pick(placement, self._fleet.views(), self._rng, tried)
                    span.set_attribute("loraplex.worker.id", choice.worker.worker_id)
                    span.set_attribute("loraplex.placement.expected_s", choice.expected_s)
            except errors.NoWorker:
                if failure is not None:
                    raise failure from None
                raise
            if failure is not None:
                if in_quarantine(choice.worker, placement.artifact_digest):
                    raise failure
                self._on_retry(failure.reason)
                log.warning(
                    "forward.retry",
                    request_id=job.request_id,
                    worker_id=tried[-1],
                    reason=failure.reason,
                    error=str(failure),
                )
            try:
                stream = await self._attempt(choice, placement, job, request, remaining_s, len(tried) + 1)
            except errors.LoraplexError as error:
                if failure is not None and isinstance(error, errors.DeadlineUnreachable | errors.DeadlineExceeded):
                    raise failure from None  # says more than that too little time was left for another worker
                tried.append(choice.worker.worker_id)
                if not is_retryable(error) or len(tried) == _MAX_ATTEMPTS:
                    raise
                failure = error
            else:
                self._traffic.placed(job.tenant, job.resolved, choice.worker.worker_id)
                return stream

    async def _attempt(
        self,
        choice: Pick,
        placement: PlacementRequest,
        job: Job,
        request: worker_pb2.GenerateRequest,
        remaining_s: float,
        attempt: int,
    ) -> WorkerStream:
        worker, version = choice.worker, job.resolved.version
        if choice.expected_s > remaining_s:
            digest = placement.artifact_digest
            if version is not None and not (is_warm(worker, digest) or in_quarantine(worker, digest)):
                self._traffic.could_not_wait(worker.worker_id, version)  # so that the request can come again
            raise errors.DeadlineUnreachable(
                f"the first token is expected in {choice.expected_s:.1f} s and the deadline is in {remaining_s:.1f} s",
                retry_after_s=choice.expected_s - remaining_s,
                expected_s=round(choice.expected_s, 3),
            )
        flight = self._fleet.begin(worker.address, prompt_tokens_on(worker, placement), placement.artifact_digest)
        trace = CallTrace(worker.worker_id, attempt)
        call = self._fleet.stub(worker.address).Generate(
            request,
            timeout=remaining_s,
            metadata=((REQUEST_ID_KEY, request.request_id), *self._fleet.credentials, *trace.metadata()),
        )
        stream = WorkerStream(
            call,
            flight,
            worker.worker_id,
            trace,
            self._streams.discard,
            lambda finished: self._traffic.finished(job.tenant, job.resolved, finished.facts),
        )
        self._streams.add(stream)
        try:
            await stream.start()
        except BaseException:
            stream.close()
            raise
        return stream
