"""A registry and workers for router tests: real gRPC servers on real sockets whose behaviour the test scripts."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc import aio

from common.rpc import Server, open_channel
from loraplex.errors import LoraplexError
from loraplex.registry.v1 import adapter_pb2, adapter_pb2_grpc, base_model_pb2
from loraplex.router.v1 import inference_pb2, inference_pb2_grpc, models_pb2_grpc
from loraplex.types.v1 import generation_pb2
from loraplex.worker.v1 import worker_pb2, worker_pb2_grpc
from router.server import Router
from router.settings import RouterSettings

ROOT = Path(__file__).resolve().parents[2]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


BASE_ID = "tiny/base"
BASE = digest("base")


def base_entry(base_id: str = BASE_ID, base_digest: str = BASE) -> adapter_pb2.CatalogEntry:
    base = base_model_pb2.BaseModel(base_id=base_id, digest=base_digest, architecture="LlamaForCausalLM")
    base.create_time.FromSeconds(1_700_000_000)
    return adapter_pb2.CatalogEntry(base_model=base)


def version(tag: str) -> adapter_pb2.AdapterVersion:
    made = adapter_pb2.AdapterVersion(
        version_digest=digest(f"version {tag}"),
        artifact_digest=digest(f"artifact {tag}"),
        base_digest=BASE,
        format="none",
        rank=8,
        artifact_bytes=1000,
    )
    made.create_time.FromSeconds(1_700_000_001)
    return made


def adapter_entry(name: str, *tags: str) -> adapter_pb2.CatalogEntry:
    """An adapter whose first tag is the current version."""
    versions = [version(tag) for tag in tags or (name,)]
    return adapter_pb2.CatalogEntry(
        adapter=adapter_pb2.Adapter(
            tenant="default", name=name, base_id=BASE_ID, current=versions[0], versions=versions
        )
    )


def deleted_entry(name: str) -> adapter_pb2.CatalogEntry:
    return adapter_pb2.CatalogEntry(deleted_adapter=adapter_pb2.AdapterKey(tenant="default", name=name))


class FakeRegistry(adapter_pb2_grpc.AdapterServiceServicer):
    """AdapterService.Watch over a scripted log of transactions. The other RPCs are not what a router calls."""

    def __init__(self, *entries: adapter_pb2.CatalogEntry, store_id: str = "store-1") -> None:
        self.store_id = store_id
        self.log: list[list[adapter_pb2.CatalogEntry]] = [list(entries)] if entries else []
        self.requests: list[adapter_pb2.WatchRequest] = []
        self.send_heartbeats = True
        self.skips_a_revision = False
        self.heartbeat_s = 5.0
        self._wake = asyncio.Condition()
        self._server: Server | None = None
        self.port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> FakeRegistry:
        self._server = Server(
            [lambda server: adapter_pb2_grpc.add_AdapterServiceServicer_to_server(self, server)],
            [adapter_pb2.DESCRIPTOR.services_by_name["AdapterService"]],
        )
        self.port = await self._server.start("127.0.0.1", self.port)
        return self

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.stop(0)
        self._server = None

    async def commit(self, *entries: adapter_pb2.CatalogEntry) -> int:
        async with self._wake:
            self.log.append(list(entries))
            self._wake.notify_all()
        return len(self.log)

    async def Watch(
        self, request: adapter_pb2.WatchRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[adapter_pb2.WatchResponse]:
        self.requests.append(request)
        if request.store_id == self.store_id and request.revision <= len(self.log):
            position = request.revision
            yield adapter_pb2.WatchResponse(resumed=adapter_pb2.Resumed(revision=position))
        else:
            position = len(self.log)
            for transaction in self.log[:position]:
                yield adapter_pb2.WatchResponse(snapshot=adapter_pb2.SnapshotPart(entries=transaction))
            yield adapter_pb2.WatchResponse(synced=adapter_pb2.Synced(store_id=self.store_id, revision=position))
        while True:
            while position < len(self.log):
                position += 1
                if self.skips_a_revision:
                    self.skips_a_revision = False
                    continue
                change = adapter_pb2.Change(revision=position, entries=self.log[position - 1])
                yield adapter_pb2.WatchResponse(change=change)
            async with self._wake:
                try:
                    async with asyncio.timeout(self.heartbeat_s):
                        await self._wake.wait_for(lambda: position < len(self.log))  # noqa: B023
                except TimeoutError:
                    pass
                else:
                    continue
            if self.send_heartbeats:
                yield adapter_pb2.WatchResponse(heartbeat=adapter_pb2.Heartbeat(head_revision=position))

    def UploadArtifact(self, request_iterator: Any, context: Any) -> Any:
        raise NotImplementedError

    def DownloadArtifact(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    def GetAdapter(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    def ListAdapters(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    def DeleteAdapter(self, request: Any, context: Any) -> Any:
        raise NotImplementedError


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


@dataclass(eq=False)
class FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    """WorkerService whose answers are a script. Counts what it was asked and what was cancelled."""

    worker_id: str = "w1"
    base_digest: str = BASE
    script: Script = say_hello
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

    def __post_init__(self) -> None:
        self.accepts.set()
        self._server: Server | None = None
        self._ends_status = False

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

    async def end_status_streams(self) -> None:
        async with self.changed:
            self._ends_status = True
            self.changed.notify_all()

    async def until(self, condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
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
        } | self.status
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
        seen = self.sequence
        yield self._message(full=True)
        while not self._ends_status:
            try:
                async with asyncio.timeout(1.0), self.changed:
                    await self.changed.wait_for(lambda: self._ends_status or self.sequence != seen)  # noqa: B023
            except TimeoutError:
                pass
            if not self._ends_status:
                seen = self.sequence
                yield self._message(full=False)

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


@dataclass
class RunningRouter:
    """A router in this process and clients to it."""

    router: Router
    channel: aio.Channel

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.router.http_port}"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.router.grpc_port}"

    @property
    def inference(self) -> inference_pb2_grpc.InferenceServiceAsyncStub:
        return inference_pb2_grpc.InferenceServiceStub(self.channel)

    @property
    def models(self) -> models_pb2_grpc.ModelServiceAsyncStub:
        return models_pb2_grpc.ModelServiceStub(self.channel)

    async def generate(
        self, model: str, *, prompt: str = "Hi", timeout_s: float | None = 10.0, metadata: Any = (), **fields: Any
    ) -> list[inference_pb2.GenerateResponse]:
        request = inference_pb2.GenerateRequest(model=model, prompt=prompt, **fields)
        return [event async for event in self.inference.Generate(request, timeout=timeout_s, metadata=metadata)]

    async def until_workers(self, count: int, timeout_s: float = 5.0) -> None:
        """Wait until this many workers are reachable."""
        await eventually(
            lambda: sum(view.state.value != "unreachable" for view in self.router.fleet.views()) == count, timeout_s
        )


async def eventually(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Wait for a condition of another part that offers no event to wait for."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running_router(
    registry: str, *workers: str, ready: bool = True, **settings: Any
) -> AsyncIterator[RunningRouter]:
    """Run a router on free ports until the block ends; then it must stop in time."""
    defaults: dict[str, Any] = {
        "port": 0,
        "http_port": 0,
        "registry": registry,
        "workers": ",".join(workers) or "127.0.0.1:1",
        "drain_delay_s": 0.0,
        "drain_timeout_s": 0.5,
    }
    router = Router(RouterSettings(**(defaults | settings)))
    stop, bound = asyncio.Event(), asyncio.Event()
    running = asyncio.create_task(router.run(stop, bound.set))
    waiting = asyncio.create_task(bound.wait())
    await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED, timeout=5)
    if not bound.is_set():
        waiting.cancel()
        running.cancel()
        await running
    channel = open_channel(f"127.0.0.1:{router.grpc_port}")
    handle = RunningRouter(router, channel)
    try:
        if ready:
            async with asyncio.timeout(5):
                await router.catalog.ready.wait()
            if workers:
                await handle.until_workers(len(workers))
        yield handle
    finally:
        await channel.close()
        stop.set()
        async with asyncio.timeout(15):
            await running


def code_of(error: grpc.RpcError) -> grpc.StatusCode:
    assert isinstance(error, aio.AioRpcError)
    return error.code()


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
        sys.executable, "-m", "tests.integration.router_fakes", worker_id, stdout=asyncio.subprocess.PIPE, cwd=ROOT
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
