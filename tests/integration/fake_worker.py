"""A worker that answers by a script, in this process or in one of its own."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpc import aio

from common.rpc import Server
from loraplex.errors import FailedPrecondition, LoraplexError
from loraplex.types.v1 import evaluation_pb2, generation_pb2
from loraplex.worker.v1 import worker_pb2, worker_pb2_grpc
from tests.integration.fake_registry import BASE

ROOT = Path(__file__).resolve().parents[2]

Event = worker_pb2.GenerateResponse
Script = Callable[["FakeWorker", worker_pb2.GenerateRequest], AsyncIterator[Event]]


def delta(text: str, index: int = 0, **fields: Any) -> Event:
    return Event(delta=generation_pb2.Delta(index=index, text=text, **fields))


def choice_finished(index: int = 0, reason: int = generation_pb2.FINISH_REASON_STOP) -> Event:
    return Event(choice_finished=generation_pb2.ChoiceFinished(index=index, reason=reason))  # type: ignore[arg-type]


def finished(worker: FakeWorker, request: worker_pb2.GenerateRequest, prompt: int, completion: int) -> Event:
    facts = generation_pb2.ServingFacts(
        base_digest=request.base_digest,
        version_digest=request.adapter.version_digest,
        artifact_digest=request.adapter.artifact_digest,
        worker_id=worker.worker_id,
    )
    facts.queue_time.FromMilliseconds(3)
    facts.decode_time.FromMilliseconds(20)
    if request.HasField("adapter"):
        facts.tier_hit = generation_pb2.ADAPTER_TIER_DEVICE
    usage = generation_pb2.Usage(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=prompt - 1)
    return Event(finished=generation_pb2.Finished(usage=usage, facts=facts))


def position(token: str, *others: str) -> generation_pb2.PositionLogprobs:
    top = [
        generation_pb2.TokenLogprob(token_id=i, token=text.encode(), logprob=-0.5 - i)
        for i, text in enumerate((token, *others)[: len(others)])
    ]
    chosen = generation_pb2.TokenLogprob(token_id=0, token=token.encode(), logprob=-0.5)
    return generation_pb2.PositionLogprobs(chosen=chosen, top=top)


async def say_hello(worker: FakeWorker, request: worker_pb2.GenerateRequest) -> AsyncIterator[Event]:
    """Every choice says `Hello <adapter or base> <i>`, word by word."""
    words = ["Hello", " adapter" if request.HasField("adapter") else " base", "!"]
    n = request.sampling.n or 1
    want = request.sampling.logprobs if request.sampling.HasField("logprobs") else None
    for i, word in enumerate(words):
        for index in range(n):
            logprobs = [] if want is None else [position(word, *(f"alt{k}" for k in range(want)))]
            yield delta(word, index, token_ids=[i], logprobs=logprobs)
    for index in range(n):
        yield choice_finished(index)
    yield finished(worker, request, 5, 3 * n)


async def babble_forever(worker: FakeWorker, request: worker_pb2.GenerateRequest) -> AsyncIterator[Event]:
    while True:
        yield delta("ba ")
        await asyncio.sleep(0.01)


async def never_answer(worker: FakeWorker, request: worker_pb2.GenerateRequest) -> AsyncIterator[Event]:
    await asyncio.Event().wait()
    yield delta("never")


def raising(error: LoraplexError, *before: Event) -> Script:
    """Say `before`, then fail."""

    async def script(worker: FakeWorker, request: worker_pb2.GenerateRequest) -> AsyncIterator[Event]:
        for event in before:
            yield event
        raise error

    return script


EvaluationScript = Callable[
    ["FakeWorker", worker_pb2.EvaluateAdapterRequest], AsyncIterator[worker_pb2.EvaluateAdapterResponse]
]


async def evaluate_at_once(
    worker: FakeWorker, request: worker_pb2.EvaluateAdapterRequest
) -> AsyncIterator[worker_pb2.EvaluateAdapterResponse]:
    """Tells progress and then figures that name what was asked for, and this worker as the device."""
    progress = evaluation_pb2.EvaluationProgress(done_prompts=1, total_prompts=2)
    yield worker_pb2.EvaluateAdapterResponse(progress=progress)
    evaluation = evaluation_pb2.Evaluation(
        version_digest=request.version_digest,
        artifact_digest=request.artifact_digest,
        exact_artifact_digest=request.exact_artifact_digest,
        base_digest=request.base_digest,
        num_positions=7,
        device=worker.worker_id,
    )
    yield worker_pb2.EvaluateAdapterResponse(evaluation=evaluation)


@dataclass(eq=False)
class FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    """WorkerService whose answers are a script. Counts what it was asked and what was cancelled."""

    worker_id: str = "w1"
    base_digest: str = BASE
    script: Script = say_hello
    evaluation: EvaluationScript = evaluate_at_once
    port: int = 0
    state: int = worker_pb2.WORKER_STATE_SERVING
    epoch: str = "e1"
    sequence: int = 1
    sends_sequence: bool = True
    accepts: asyncio.Event = field(default_factory=asyncio.Event)
    requests: list[worker_pb2.GenerateRequest] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)
    time_remaining_s: list[float | None] = field(default_factory=list)
    num_cancelled: int = 0
    in_flight: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    status: dict[str, Any] = field(default_factory=dict)
    held: dict[str, worker_pb2.AdapterResidency] = field(default_factory=dict)
    """What LoadAdapter, PrefetchAdapter and PinAdapter brought here, by artifact digest; told in the status."""
    told: list[tuple[str, str]] = field(default_factory=list)
    """Those calls in the order they came: (what, artifact digest)."""
    refuses: LoraplexError | None = None
    """What those calls are refused with."""

    def __post_init__(self) -> None:
        self.accepts.set()
        self._server: Server | None = None
        self._ends_status = False
        self._gone: set[str] = set()
        self._num_restarts = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> FakeWorker:
        self._ends_status = False
        self._server = Server(
            [lambda server: worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)],
            [worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]],
        )
        self.port = await self._server.start("127.0.0.1", self.port)
        return self

    async def stop(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(0)

    async def set(self, state: int | None = None, **status: Any) -> None:
        """Change the status and push it."""
        async with self.changed:
            self.state = self.state if state is None else state
            self.status |= status
            self.sequence += 1
            self.changed.notify_all()

    async def restart_engine(self, epoch: str) -> None:
        """Lose everything that was on the device, as an engine that was started anew."""
        async with self.changed:
            self.held.clear()
            self._gone.clear()
            self.epoch = epoch
            self.sequence += 1
            self._num_restarts += 1
            self.changed.notify_all()

    async def end_status_streams(self) -> None:
        async with self.changed:
            self._ends_status = True
            self.changed.notify_all()

    async def until(self, condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(condition)

    def _message(self, *, full: bool) -> worker_pb2.WatchStatusResponse:
        fields: dict[str, Any] = {
            "base_digest": self.base_digest,
            "running_requests": 0,
            "waiting_requests": 0,
            "queued_prefill_tokens": 0,
            "prefill_tokens_per_second": 1000.0,
            "decode_tokens_per_second": 100.0,
            "free_blocks": 100,
            "total_blocks": 128,
            "device": "cpu",
            "dtype": "float32",
            "base_quantization": "int8",
            "removed_artifact_digests": [] if full else sorted(self._gone),
        } | self.status
        fields["adapters"] = [*fields.get("adapters", ()), *self.held.values()]
        return worker_pb2.WatchStatusResponse(
            full=full,
            worker_id=self.worker_id,
            epoch=self.epoch,
            sequence=self.sequence,
            state=self.state,  # type: ignore[arg-type]
            **fields,
        )

    async def WatchStatus(
        self, request: worker_pb2.WatchStatusRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.WatchStatusResponse]:
        seen, restarts = self.sequence, self._num_restarts
        yield self._message(full=True)
        while not self._ends_status:
            try:
                async with asyncio.timeout(0.5), self.changed:
                    await self.changed.wait_for(lambda: self._ends_status or self.sequence != seen)  # noqa: B023
            except TimeoutError:
                pass
            if not self._ends_status:
                full, seen, restarts = restarts != self._num_restarts, self.sequence, self._num_restarts
                yield self._message(full=full)

    async def LoadAdapter(
        self, request: worker_pb2.LoadAdapterRequest, context: aio.ServicerContext[Any, Any]
    ) -> worker_pb2.LoadAdapterResponse:
        tier = await self._hold("load", request.adapter, generation_pb2.ADAPTER_TIER_DEVICE)
        return worker_pb2.LoadAdapterResponse(tier_hit=tier)

    async def PrefetchAdapter(
        self, request: worker_pb2.PrefetchAdapterRequest, context: aio.ServicerContext[Any, Any]
    ) -> worker_pb2.PrefetchAdapterResponse:
        to = generation_pb2.ADAPTER_TIER_DEVICE if request.to_device else generation_pb2.ADAPTER_TIER_DISK
        what = "for_request" if request.for_request else "to_device" if request.to_device else "to_disk"
        return worker_pb2.PrefetchAdapterResponse(tier=await self._hold(what, request.adapter, to))

    async def PinAdapter(
        self, request: worker_pb2.PinAdapterRequest, context: aio.ServicerContext[Any, Any]
    ) -> worker_pb2.PinAdapterResponse:
        if request.pinned:
            tier = await self._hold("pin", request.adapter, generation_pb2.ADAPTER_TIER_DEVICE, pinned=True)
        else:
            tier = await self._hold("unpin", request.adapter, generation_pb2.ADAPTER_TIER_DEVICE, pinned=False)
        return worker_pb2.PinAdapterResponse(tier=tier)

    async def UnloadAdapter(
        self, request: worker_pb2.UnloadAdapterRequest, context: aio.ServicerContext[Any, Any]
    ) -> worker_pb2.UnloadAdapterResponse:
        digest = request.artifact_digest
        self.told.append(("unload from disk" if request.from_disk else "unload", digest))
        if self.refuses is not None:
            raise self.refuses
        known = self.held.get(digest)
        if known is None:
            return worker_pb2.UnloadAdapterResponse()
        if known.pinned:
            raise FailedPrecondition(f"{digest[:12]} is pinned")
        async with self.changed:
            if request.from_disk:
                del self.held[digest]
                self._gone.add(digest)
            else:
                known.tier = generation_pb2.ADAPTER_TIER_DISK
            self.sequence += 1
            self.changed.notify_all()
        return worker_pb2.UnloadAdapterResponse(tier=generation_pb2.ADAPTER_TIER_DEVICE)

    async def _hold(
        self, what: str, adapter: worker_pb2.ResolvedAdapter, tier: int, *, pinned: bool | None = None
    ) -> generation_pb2.AdapterTier.ValueType:
        """Have the adapter in this tier at least; returns where it was."""
        digest = adapter.artifact_digest
        self.told.append((what, digest))
        if self.refuses is not None:
            raise self.refuses
        async with self.changed:
            known = self.held.setdefault(
                digest,
                worker_pb2.AdapterResidency(artifact_digest=digest, tier=generation_pb2.ADAPTER_TIER_SOURCE),
            )
            before = known.tier
            known.tier = generation_pb2.AdapterTier.ValueType(min(before, tier))
            known.pinned = known.pinned if pinned is None else pinned
            self._gone.discard(digest)
            self.sequence += 1
            self.changed.notify_all()
        return before

    async def EvaluateAdapter(
        self, request: worker_pb2.EvaluateAdapterRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.EvaluateAdapterResponse]:
        self.time_remaining_s.append(context.time_remaining())
        self.in_flight += 1
        ended = False
        try:
            async for event in self.evaluation(self, request):
                yield event
            ended = True
        except Exception:
            ended = True
            raise
        finally:
            self.in_flight -= 1
            self.num_cancelled += not ended
            asyncio.get_running_loop().create_task(self._notify())

    async def Generate(
        self, request: worker_pb2.GenerateRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Event]:
        async with self.changed:
            self.requests.append(request)
            self.metadata.append(dict(context.invocation_metadata() or ()))
            self.time_remaining_s.append(context.time_remaining())
            self.in_flight += 1
            self.changed.notify_all()
        ended = False
        try:
            await self.accepts.wait()
            if self.sends_sequence:
                await context.send_initial_metadata((("x-loraplex-status-sequence", str(self.sequence + 1)),))
            async for event in self.script(self, request):
                yield event
            ended = True
        except Exception:
            ended = True
            raise
        finally:
            self.in_flight -= 1
            self.num_cancelled += not ended
            asyncio.get_running_loop().create_task(self._notify())

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()


async def _serve_one_worker() -> None:
    """Run a worker that babbles as a process of its own, for tests that kill it: prints its port."""
    worker = await FakeWorker(worker_id=sys.argv[1], script=babble_forever).start()
    sys.stdout.write(f"{worker.port}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


@asynccontextmanager
async def worker_process(worker_id: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Run a babbling worker as a process; yields it and its address."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.integration.fake_worker", worker_id, stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            port = int(await process.stdout.readline())
        yield process, f"127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


if __name__ == "__main__":
    asyncio.run(_serve_one_worker())
