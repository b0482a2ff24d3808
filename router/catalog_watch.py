"""Feeds the catalog from the registry's Watch stream: snapshot or resume, then change by change, for ever.

Knows the wire; decides nothing about names. With the registry gone the catalog stays as it is.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable
from typing import Final

import structlog
from grpc import aio

from common.backoff import Backoff
from common.rpc import open_channel
from loraplex.credentials import Metadata
from loraplex.registry.v1 import adapter_pb2, adapter_pb2_grpc
from router.catalog import (
    Adapter,
    ApiKey,
    Base,
    Catalog,
    CatalogSnapshot,
    DeletedAdapter,
    DeletedApiKey,
    Entry,
    Version,
)

log = structlog.get_logger(__name__)

SILENCE_S: Final = 15.0
RECONNECT: Final = Backoff(first_s=0.1, longest_s=1.0)
_REMIND_S: Final = 10.0


class _OutOfStep(Exception):
    """The stream does not continue the catalog we hold."""


def entries_of(messages: Iterable[adapter_pb2.CatalogEntry]) -> list[Entry]:
    """Return the entries of the kinds this router knows."""
    entries: list[Entry] = []
    for message in messages:
        match message.WhichOneof("entry"):
            case "base_model":
                base = message.base_model
                entries.append(
                    Base(
                        base.base_id, base.digest, base.architecture, base.num_parameters, base.create_time.ToSeconds()
                    )
                )
            case "adapter":
                adapter = message.adapter
                current = _version(adapter.current)
                versions = tuple(_version(version) for version in adapter.versions) or (current,)
                entries.append(
                    Adapter(adapter.tenant, adapter.name, adapter.base_id, current, versions, adapter.pin_replicas)
                )
            case "deleted_adapter":
                entries.append(DeletedAdapter(message.deleted_adapter.tenant, message.deleted_adapter.name))
            case "api_key":
                key = message.api_key
                entries.append(ApiKey(key.key_id, key.tenant, key.key_sha256))
            case "deleted_api_key_id":
                entries.append(DeletedApiKey(message.deleted_api_key_id))
            case _:
                pass  # of a newer registry; nothing a request of this router could name
    return entries


def _version(message: adapter_pb2.AdapterVersion) -> Version:
    return Version(
        version_digest=message.version_digest,
        artifact_digest=message.artifact_digest,
        base_digest=message.base_digest,
        format=message.format,
        rank=message.rank,
        artifact_bytes=message.artifact_bytes,
        create_time_s=message.create_time.ToSeconds(),
    )


class CatalogWatch:
    """Keeps one Watch stream open; `credentials` go with it.

    `silence_s` is how long a stream may say nothing before it counts as dead.
    """

    def __init__(
        self,
        catalog: Catalog,
        address: str,
        *,
        credentials: Metadata = (),
        rng: random.Random | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._catalog = catalog
        self._address = address
        self._credentials = credentials
        self._silence_s = silence_s
        self._rng = rng or random.Random()  # noqa: S311 - jitter, not a secret
        self._failures = 0
        self._force_snapshot = False
        self._last_log_s: float | None = None

    async def run(self) -> None:
        """Follow the registry until cancelled."""
        while True:
            try:
                async with open_channel(self._address) as channel:
                    await self._follow(adapter_pb2_grpc.AdapterServiceStub(channel))
                self._lost("the stream ended")
            except aio.AioRpcError as error:
                self._lost(f"{error.code().name}: {error.details()}")
            except TimeoutError:
                self._lost(f"nothing came for {self._silence_s:g} s")
            except _OutOfStep as error:
                self._force_snapshot = True
                self._lost(str(error))
            self._failures += 1
            await asyncio.sleep(RECONNECT.jittered_s(self._failures, self._rng))

    async def _follow(self, stub: adapter_pb2_grpc.AdapterServiceAsyncStub) -> None:
        held = self._catalog.snapshot
        resume = self._catalog.ready.is_set() and not self._force_snapshot
        request = adapter_pb2.WatchRequest()
        if resume:
            request.store_id, request.revision = held.store_id, held.revision
        call = stub.Watch(request, metadata=self._credentials)
        stream = aiter(call)
        fresh: list[Entry] = []
        in_step = False
        head_before = 0
        try:
            while True:
                async with asyncio.timeout(self._silence_s):
                    message = await anext(stream, None)
                if message is None:
                    return
                match message.WhichOneof("event"):
                    case "snapshot":
                        in_step = False
                        fresh += entries_of(message.snapshot.entries)
                    case "synced":
                        synced = message.synced
                        self._catalog.swap(
                            CatalogSnapshot().apply(fresh, store_id=synced.store_id, revision=synced.revision)
                        )
                        fresh, in_step = [], True
                        self._force_snapshot = False
                        self._found("synced")
                    case "resumed":
                        if not resume or message.resumed.revision != held.revision:
                            raise _OutOfStep("the registry resumed another revision than ours")
                        in_step = True
                        self._found("resumed")
                    case "change":
                        self._apply(message.change, in_step=in_step)
                    case "heartbeat":
                        # Changes come in order on this stream: what an earlier heartbeat knew must be here by now.
                        if in_step and self._catalog.snapshot.revision < head_before:
                            raise _OutOfStep(f"revision {head_before} was announced and never came")
                        head_before = message.heartbeat.head_revision
                    case _:
                        pass
        finally:
            call.cancel()

    def _apply(self, change: adapter_pb2.Change, *, in_step: bool) -> None:
        held = self._catalog.snapshot
        if not in_step or change.revision != held.revision + 1:
            raise _OutOfStep(f"change {change.revision} does not follow revision {held.revision}")
        self._catalog.swap(held.apply(entries_of(change.entries), revision=change.revision))

    def _found(self, how: str) -> None:
        snapshot = self._catalog.snapshot
        log.info(
            "catalog.followed",
            how=how,
            registry=self._address,
            revision=snapshot.revision,
            bases=len(snapshot.bases),
            adapters=len(snapshot.adapters),
        )
        self._failures = 0
        self._catalog.in_step = True

    def _lost(self, why: str) -> None:
        self._catalog.in_step = False
        now_s = time.monotonic()
        if self._last_log_s is not None and now_s - self._last_log_s < _REMIND_S:
            return
        self._last_log_s = now_s
        if self._catalog.ready.is_set():
            event, note = "catalog.registry_lost", "serving goes on with the catalog held; trying again"
        else:
            event, note = "catalog.waiting_for_registry", "not ready until it answers; trying again"
        log.warning(event, registry=self._address, error=why, note=note)
