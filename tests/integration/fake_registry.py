"""A registry that is only its Watch: a catalog that tests write into."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import Any

from grpc import aio

from common.rpc import Server
from loraplex.registry.v1 import adapter_pb2, adapter_pb2_grpc, base_model_pb2


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


def adapter_entry(name: str, *tags: str, pin_replicas: int = 0) -> adapter_pb2.CatalogEntry:
    """An adapter whose first tag is the current version."""
    versions = [version(tag) for tag in tags or (name,)]
    return adapter_pb2.CatalogEntry(
        adapter=adapter_pb2.Adapter(
            tenant="default",
            name=name,
            base_id=BASE_ID,
            current=versions[0],
            versions=versions,
            pin_replicas=pin_replicas,
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

    def FindUpload(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    def ImportAdapter(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    def DownloadArtifact(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    def GetAdapter(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    def ListAdapters(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    def UpdateAdapter(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    def RecordEvaluation(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    def PinAdapter(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    def DeleteAdapter(self, request: Any, context: Any) -> Any:
        raise NotImplementedError
