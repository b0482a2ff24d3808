"""The gRPC face of a worker: Generate, EvaluateAdapter and WatchStatus; the RPCs that steer adapters are beside it.

Wires one RPC through validation, admission, text, adapter and engine, and turns what comes back into messages. Owns no
state but whether the worker takes requests.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import structlog
from grpc import aio
from msgspec.structs import replace

from common import tracing
from loraplex.errors import DeadlineExceeded, Draining, EngineDown, LoraplexError
from loraplex.metadata_keys import STATUS_SEQUENCE_KEY
from loraplex.worker.v1.worker_pb2 import (
    EvaluateAdapterRequest,
    EvaluateAdapterResponse,
    GenerateRequest,
    GenerateResponse,
    WatchStatusRequest,
    WatchStatusResponse,
)
from worker import mailbox
from worker.adapter_service import AdapterService
from worker.adapters.access import AdapterAccess
from worker.adapters.late_file import LateFile
from worker.adapters.steering import Steering
from worker.adapters.store import AdapterStore, Lease
from worker.adapters.versions import Versions
from worker.admission import Admission, Ticket
from worker.dedicated import Dedication
from worker.engine_client import EngineClient, EngineState
from worker.evaluation.evaluator import Evaluator
from worker.evaluation.requests import check_evaluation
from worker.generation import ChoiceEnd, Generation, StreamLimits, TextDelta
from worker.messages import (
    choice_end_message,
    delta_message,
    evaluation_message,
    finished_message,
    serving_facts,
    status_message,
    tier_of,
)
from worker.metrics import Metrics, Observation
from worker.requests import CheckedRequest, Conversation, check_request
from worker.sampling import SEED_BITS
from worker.status import StatusBoard
from worker.text.choice import ChoiceText
from worker.text.model import TextModel, too_long
from worker.traces import EngineTrace, describe_answer, describe_request

log = structlog.get_logger(__name__)

Context = aio.ServicerContext[GenerateRequest, GenerateResponse]


@dataclass(frozen=True, slots=True)
class ServedBase:
    """The base model this worker serves: its digest and its text side."""

    digest: str
    text: TextModel


@dataclass(frozen=True, slots=True)
class Parts:
    """What the service works with; each part has its own owner."""

    worker_id: str
    engine: EngineClient
    admission: Admission
    store: AdapterStore
    versions: Versions
    access: AdapterAccess
    steering: Steering
    board: StatusBoard
    limits: StreamLimits
    metrics: Metrics
    max_rank: int | None = None
    dedication: Dedication | None = None


class _Held:
    """What one RPC holds, given back once, whoever notices its end first."""

    __slots__ = ("cut", "generation", "lease", "limit", "observation", "task", "ticket")

    def __init__(self, ticket: Ticket, observation: Observation) -> None:
        self.ticket = ticket
        self.observation = observation
        self.task = asyncio.current_task()
        self.cut: LoraplexError | None = None
        self.lease: Lease | None = None
        self.generation: Generation | None = None
        self.limit: asyncio.TimerHandle | None = None

    def close(self) -> None:
        if self.limit is not None:
            self.limit.cancel()
        if self.generation is not None:
            self.generation.close()
        if self.lease is not None:
            self.lease.release()
        self.ticket.close(time.monotonic())
        self.observation.end()

    def fail(self, error: LoraplexError) -> None:
        """End the RPC with an error, wherever it is: in the engine, or still on its way there."""
        if self.generation is not None:
            self.generation.fail(error)
        elif self.task is not None and self.cut is None:
            self.cut = error
            self.task.cancel()


class WorkerService(AdapterService):
    """Serves routers. Takes requests once `open` was called, until `refuse`."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts.steering, parts.max_rank, parts.dedication)
        self._parts = parts
        self._base: ServedBase | None = None
        self._refusal: Callable[[], LoraplexError] | None = None
        self._held: set[_Held] = set()
        self._evaluator = Evaluator(parts.engine, parts.admission, parts.store, parts.versions)

    def open(self, base: ServedBase) -> None:
        """Serve this base model, whenever the engine is ready."""
        self._base = base

    def refuse(self) -> None:
        """Answer every new request with Draining, and give up an evaluation, which nobody waits for in haste."""
        self._refusal = lambda: Draining("the worker is draining; another worker may take the request")
        self._evaluator.cut(self._refusal())
        self._parts.steering.stop()

    def cut_all(self) -> None:
        """End the streams that are still open, with Draining."""
        for held in list(self._held):
            held.fail(Draining("the worker stopped before the answer was complete"))

    async def Generate(  # noqa: N802 - gRPC's name
        self, request: GenerateRequest, context: Context
    ) -> AsyncIterator[GenerateResponse]:
        """Generate text: see worker.proto."""
        arrival_s = time.monotonic()
        base, ready = self._serving()
        checked = check_request(request, base_digest=base.digest, vocab_size=ready.vocab_size, max_rank=self._max_rank)
        if self._dedication is not None:
            self._dedication.check(None if checked.adapter is None else checked.adapter.artifact_digest)
        describe_request(checked, base.digest)
        remaining_s = context.time_remaining()
        if remaining_s is not None and remaining_s <= 0:
            raise DeadlineExceeded("the deadline passed before the request was read")
        digest = checked.adapter.artifact_digest if checked.adapter else None
        ticket = self._parts.admission.admit(checked.sampling.n, digest, arrival_s)
        held = _Held(ticket, Observation(self._parts.metrics, arrival_s))
        self._held.add(held)

        def give_back(_: object = None) -> None:
            held.close()
            self._held.discard(held)

        # The handler may be suspended in a write when the client goes away; gRPC's callback comes in every case.
        context.add_done_callback(give_back)  # type: ignore[arg-type] # the stubs name a class where grpc takes any callable
        try:
            async for message in self._answer(checked, base, ready, held, context, arrival_s):
                yield message
        except asyncio.CancelledError:
            if held.cut is None or held.task is None:
                raise
            held.task.uncancel()
            held.observation.failed(held.cut)
            raise held.cut from None
        except LoraplexError as error:
            held.observation.failed(error)
            log.info("generate.failed", request_id=checked.request_id, reason=error.reason, why=error.message)
            raise
        finally:
            give_back()

    async def _answer(
        self,
        checked: CheckedRequest,
        base: ServedBase,
        ready: mailbox.Ready,
        held: _Held,
        context: Context,
        arrival_s: float,
    ) -> AsyncIterator[GenerateResponse]:
        parts, sampling, adapter = self._parts, checked.sampling, checked.adapter
        with tracing.span("tokenize") as span:
            prompt = await _tokenize(checked, base.text, limit=ready.max_context_tokens - 1)
            span.set_attribute("gen_ai.usage.input_tokens", len(prompt))
        held.ticket.tokenized(len(prompt))
        await context.send_initial_metadata(((STATUS_SEQUENCE_KEY, str(parts.board.sequence)),))

        fetch_s = 0.0
        file: mailbox.AdapterFile | None = None
        late_file: LateFile | None = None
        if adapter is not None:
            asked_s = time.monotonic()
            parts.steering.check_deadline(adapter, context.time_remaining())
            file = parts.steering.absent_file(adapter)
            if file is not None:
                late_file = parts.steering.late_file(adapter, context.time_remaining, held.fail)
            else:
                with tracing.span("adapter.fetch") as span:
                    held.lease = await parts.access.acquire(adapter, context.time_remaining())
                    span.set_attribute("loraplex.adapter.fetched", held.lease.fetched)
                fetch_s = time.monotonic() - asked_s if held.lease.waited else 0.0
                file = held.lease.file

        lease = held.lease
        seed = secrets.randbits(SEED_BITS) if sampling.seed is None else sampling.seed
        room = ready.max_context_tokens - len(prompt)

        def make(index: int, request_id: int) -> mailbox.Submit:
            return mailbox.Submit(
                request_id=request_id,
                prompt_token_ids=prompt,
                sampling=sampling.for_choice(index, seed=seed, room=room),
                adapter=file if parts.dedication is None else None,
                tenant=checked.tenant,
                arrival_s=arrival_s,
            )

        choices = [ChoiceText(base.text.vocabulary, sampling.stop, sampling.min_tokens) for _ in range(sampling.n)]
        generation = held.generation = Generation(parts.engine, held.ticket, choices, parts.limits, late_file)
        held.observation.prompt(len(prompt))
        with EngineTrace(arrival_s, generation.timing_so_far) as engine:
            generation.submit(make)  # in here: the engine may begin before this thread goes on
            if adapter is not None:
                held.limit = parts.steering.limit_wait(generation, adapter, context.time_remaining())
            async for event in generation.events():
                if isinstance(event, TextDelta):
                    held.observation.tokens(len(event.token_ids))
                    yield delta_message(event, base.text.vocabulary)
                elif isinstance(event, ChoiceEnd):
                    yield choice_end_message(event)
                else:
                    timing = event.timing
                    if parts.dedication is not None:  # to the engine it is the base
                        timing = replace(timing, adapter_on_device=True)
                    engine.finished(timing)
                    if late_file is not None and not timing.adapter_on_device:  # it had left before they began
                        lease, fetch_s = late_file.lease, late_file.fetch_s
                    facts = serving_facts(
                        timing,
                        fetch_s=fetch_s,
                        fetched=lease is not None and lease.fetched,
                        base_digest=base.digest,
                        base_quantization=ready.base_quantization,
                        digests=(adapter.version_digest, adapter.artifact_digest) if adapter else None,
                        worker_id=parts.worker_id,
                    )
                    if adapter is not None:
                        tier = tier_of(timing, fetched=lease is not None and lease.fetched)
                        held.observation.adapter(tier, fetch_s + timing.adapter_load_s)
                    held.observation.finished()
                    message = finished_message(
                        len(prompt), event.completion_tokens, facts, cached_tokens=timing.cached_tokens
                    )
                    describe_answer(message.finished)
                    yield message

    async def EvaluateAdapter(  # noqa: N802 - gRPC's name
        self,
        request: EvaluateAdapterRequest,
        context: aio.ServicerContext[EvaluateAdapterRequest, EvaluateAdapterResponse],
    ) -> AsyncIterator[EvaluateAdapterResponse]:
        """Measure an artifact against the exact one: see worker.proto."""
        base, ready = self._serving()
        checked = check_evaluation(request, base_digest=base.digest)
        if self._dedication is not None:  # whose base is not the base
            self._dedication.check(None)
        run = self._evaluator.begin(checked, base.digest, base.text, ready, context.time_remaining())
        # As in Generate: a handler that is suspended in a write hears late that its client has left.
        context.add_done_callback(lambda _: run.end())  # type: ignore[arg-type] # the stubs name a class here
        try:
            async for event in self._evaluator.events(run, base.digest, ready):
                yield evaluation_message(event)
        finally:
            run.end()

    async def WatchStatus(  # noqa: N802 - gRPC's name
        self, request: WatchStatusRequest, context: aio.ServicerContext[WatchStatusRequest, WatchStatusResponse]
    ) -> AsyncIterator[WatchStatusResponse]:
        """Stream the status: see worker.proto."""
        del request, context
        previous = None
        async for status in self._parts.board.follow():
            yield status_message(previous, status)
            previous = status

    def _serving(self) -> tuple[ServedBase, mailbox.Ready]:
        """Return what serves. Raises Draining, or EngineDown while nothing does."""
        if self._refusal is not None:
            raise self._refusal()
        engine = self._parts.engine
        if self._base is None:
            raise EngineDown("the worker is reading its base model; try again soon", retry_after_s=1.0)
        if engine.state is not EngineState.READY or engine.ready is None:
            raise engine.down_error()
        return self._base, engine.ready

    def _served_base(self) -> str:
        base, _ = self._serving()
        return base.digest


async def _tokenize(checked: CheckedRequest, text: TextModel, *, limit: int) -> tuple[int, ...]:
    prompt = checked.prompt
    if isinstance(prompt, str):
        return await text.encode_prompt(prompt, limit=limit)
    if isinstance(prompt, Conversation):
        return await text.encode_chat(prompt.messages, limit=limit)
    if len(prompt) > limit:
        raise too_long(len(prompt), limit, "token_ids")
    return prompt
