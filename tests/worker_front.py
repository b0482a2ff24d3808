"""A worker's front end in this process, around a real engine process without a model, and an artifact server."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import grpc
import pytest
from grpc import aio

from common.backoff import Backoff
from common.rpc import open_channel
from loraplex.errors import LoraplexError, from_rpc_error
from loraplex.registry.v1.adapter_pb2 import ArtifactInfo, DownloadArtifactResponse
from loraplex.registry.v1.adapter_pb2_grpc import AdapterServiceServicer, add_AdapterServiceServicer_to_server
from loraplex.types.v1.generation_pb2 import TokenInput
from loraplex.types.v1.sampling_pb2 import SamplingParams
from loraplex.worker.v1.worker_pb2 import (
    GenerateRequest,
    GenerateResponse,
    ResolvedAdapter,
    WatchStatusRequest,
    WatchStatusResponse,
)
from loraplex.worker.v1.worker_pb2_grpc import WorkerServiceStub
from worker import deadline
from worker.app import WorkerApp
from worker.engine_client import EnginePatience
from worker.generation import StreamLimits
from worker.settings import WorkerSettings

VOCAB = 300
QUICK = Backoff(first_s=0.05, longest_s=30)
TOLD_AFTER_1_S = 20.0
"""A deadline, in seconds, that a front end which tells `told_long_before` gives up after one."""
REQUEST_COUNTS: tuple[Literal["running_requests", "waiting_requests", "queued_prefill_tokens"], ...] = (
    "running_requests",
    "waiting_requests",
    "queued_prefill_tokens",
)


def told_long_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have front ends keep 95 % of a deadline for telling that it will not be met.

    A machine that stands still outlasts the little that they keep else; then the client hears gRPC's own error.
    """
    monkeypatch.setattr(deadline, "_SHARE", 0.95)
    monkeypatch.setattr(deadline, "_MOST_S", 3600.0)


@dataclass
class ArtifactServer(AdapterServiceServicer):
    """Serves blobs by digest over the real RPC, and misbehaves when told to."""

    blobs: dict[str, bytes] = field(default_factory=dict)
    opened: Counter[str] = field(default_factory=Counter)
    offsets: list[int] = field(default_factory=list)
    break_after: list[int] = field(default_factory=list)  # bytes after which the next calls end with UNAVAILABLE
    gate: asyncio.Event | None = None  # closed: the data waits for it
    gate_at: int = 0  # from this byte on
    cancelled: int = 0

    def add(self, blob: bytes, *, digest: str | None = None) -> str:
        name = digest or hashlib.sha256(blob).hexdigest()
        self.blobs[name] = blob
        return name

    async def DownloadArtifact(self, request: Any, context: Any) -> AsyncIterator[DownloadArtifactResponse]:
        digest = request.artifact_digest
        self.opened[digest] += 1
        self.offsets.append(request.offset)
        blob = self.blobs.get(digest)
        if blob is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such artifact")
            return
        yield DownloadArtifactResponse(info=ArtifactInfo(size_bytes=len(blob)))
        left = self.break_after.pop(0) if self.break_after else len(blob)
        end = min(len(blob), request.offset + left)
        for at in range(request.offset, end, 1 << 16):
            try:
                if self.gate is not None and at >= self.gate_at:
                    await self.gate.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            yield DownloadArtifactResponse(data=blob[at : min(end, at + (1 << 16))])
        if end < len(blob):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "told to break")


@asynccontextmanager
async def serving_artifacts(server: ArtifactServer, port: int = 0) -> AsyncIterator[int]:
    grpc_server = aio.server(options=[("grpc.so_reuseport", 0)])
    add_AdapterServiceServicer_to_server(server, grpc_server)
    bound = grpc_server.add_insecure_port(f"127.0.0.1:{port}")
    await grpc_server.start()
    try:
        yield bound
    finally:
        await grpc_server.stop(0)


@dataclass
class Front:
    """A running worker as a client sees it."""

    app: WorkerApp
    stub: Any
    stop: asyncio.Event
    base_digest: str
    port: int
    channel: aio.Channel
    task: asyncio.Task[None]

    def request(
        self,
        prompt: str | list[int] = "hello",
        *,
        artifact: str | None = None,
        chat: Any = None,
        base_digest: str | None = None,
        **sampling: Any,
    ) -> GenerateRequest:
        request = GenerateRequest(
            request_id="test",
            tenant="default",
            base_digest=base_digest or self.base_digest,
            sampling=SamplingParams(**sampling),
        )
        if artifact is not None:
            request.adapter.CopyFrom(
                ResolvedAdapter(version_digest="ab" * 32, artifact_digest=artifact, rank=4, format="none")
            )
        if chat is not None:
            request.chat.CopyFrom(chat)
        elif isinstance(prompt, str):
            request.prompt = prompt
        else:
            request.tokens.CopyFrom(TokenInput(token_ids=prompt))
        return request

    async def generate(self, request: GenerateRequest, within: float | None = 60) -> Answer:
        answer = Answer()
        call = self.stub.Generate(request, timeout=within)
        try:
            answer.metadata = {str(key): value for key, value in await call.initial_metadata()}
            async for message in call:
                answer.add(message)
        except grpc.RpcError as error:
            answer.error = from_rpc_error(error)
        return answer

    async def status_where(self, wanted: Callable[[dict[str, Any]], bool], within: float = 30) -> dict[str, Any]:
        """Follow the status stream until the merged status satisfies `wanted`."""
        state = Merged()
        call = self.stub.WatchStatus(WatchStatusRequest())
        try:
            async with asyncio.timeout(within):
                async for message in call:
                    state.apply(message)
                    if wanted(state.fields):
                        return state.fields
        except TimeoutError:
            raise AssertionError(f"the status never was as wanted; last: {state.fields}") from None
        finally:
            call.cancel()
        raise AssertionError(f"the status stream ended; last: {state.fields}")


@dataclass
class Answer:
    messages: list[GenerateResponse] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    error: LoraplexError | None = None

    def add(self, message: GenerateResponse) -> None:
        self.messages.append(message)

    def text(self, index: int = 0) -> str:
        return "".join(m.delta.text for m in self.messages if m.HasField("delta") and m.delta.index == index)

    def token_ids(self, index: int = 0) -> list[int]:
        return [t for m in self.messages if m.HasField("delta") and m.delta.index == index for t in m.delta.token_ids]

    @property
    def ends(self) -> dict[int, Any]:
        return {m.choice_finished.index: m.choice_finished for m in self.messages if m.HasField("choice_finished")}

    @property
    def finished(self) -> Any:
        assert self.error is None, self.error
        assert self.messages[-1].HasField("finished")
        return self.messages[-1].finished


class Merged:
    """What a router knows after applying a stream's messages in order."""

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}
        self.messages: list[WatchStatusResponse] = []

    def apply(self, message: WatchStatusResponse) -> None:
        self.messages.append(message)
        if message.full:
            self.fields = {"adapters": {}}
        for name in ("worker_id", "epoch", "sequence"):
            self.fields[name] = getattr(message, name)
        for descriptor, value in message.ListFields():
            if descriptor.name not in ("adapters", "removed_artifact_digests", "full"):
                self.fields[descriptor.name] = value
            elif descriptor.name == "adapters":
                for adapter in value:
                    self.fields["adapters"][adapter.artifact_digest] = adapter
            elif descriptor.name == "removed_artifact_digests":
                for digest in value:
                    del self.fields["adapters"][digest]
        for count in REQUEST_COUNTS:  # zero is not listed
            if message.HasField(count):
                self.fields[count] = getattr(message, count)


@asynccontextmanager
async def running_front(
    base: Path,
    cache: Path,
    *,
    registry_port: int = 1,
    limits: StreamLimits | None = None,
    wait_ready: bool = True,
    environment: dict[str, str] | None = None,
    engine_patience: EnginePatience | None = None,
    **settings: Any,
) -> AsyncIterator[Front]:
    """Run a front end; `environment` goes to the fake engine as FAKE_ENGINE_*."""
    told = {"VOCAB_SIZE": str(VOCAB), "EOS": "1", **(environment or {})}
    chosen = WorkerSettings(
        worker_id="w0",
        base_dir=base,
        cache_dir=cache,
        registry=f"127.0.0.1:{registry_port}",
        **{"port": 0, "drain_notice_s": 0.05, "drain_timeout_s": 5.0, **settings},
    )
    command = ["-m", "tests.fake_engine_process", *chosen.engine_command("")[3:]]
    at = command.index("--base-digest")
    del command[at : at + 2]
    bound: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    with mock.patch.dict(os.environ, {f"FAKE_ENGINE_{name}": value for name, value in told.items()}):
        app = WorkerApp(
            chosen,
            engine_command=[sys.executable, *command],
            engine_patience=engine_patience or EnginePatience(QUICK, exit_timeout_s=3),
            limits=limits,
            on_listening=bound.set_result,
        )
        task = asyncio.create_task(app.run(stop))
        started: list[asyncio.Future[Any]] = [task, bound]
        await asyncio.wait(started, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
        channel = open_channel(f"127.0.0.1:{bound.result()}")
        stub = WorkerServiceStub(channel)
        front = Front(app, stub, stop, "", bound.result(), channel, task)
        try:
            if wait_ready:
                status = await front.status_where(lambda fields: fields.get("state") == 2, within=60)
                front.base_digest = status["base_digest"]
            yield front
        finally:
            stop.set()
            try:
                async with asyncio.timeout(60):
                    await task
            finally:
                await channel.close()
