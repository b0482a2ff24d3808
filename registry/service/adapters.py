"""AdapterService: each call is served by the module that owns it; look-ups, downloads and deletion are here."""
# ruff: noqa: N802, ARG002 - gRPC names the methods and passes a context

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, Final

import structlog

from common.pages import decode_token, encode_token, page_size
from common.tenancy import DEFAULT_TENANT
from loraplex.errors import InvalidParameter
from loraplex.registry.v1 import adapter_pb2, adapter_pb2_grpc
from registry.artifacts import ArtifactFolder
from registry.domain import check_adapter_name, unknown_adapter
from registry.evaluations import EvaluationRecord, check_figures, evaluated_version
from registry.reserve import SpaceReserve
from registry.service.garbage import collect
from registry.service.imports import Imports
from registry.service.messages import (
    adapter_message,
    evaluation_message,
    evaluation_messages,
    figures_of,
    report_messages,
)
from registry.service.missing import open_registered
from registry.service.pinning import Pinning
from registry.service.repacking import Repacking
from registry.service.tasks import to_the_end
from registry.service.uploads import Uploads
from registry.service.watches import Watches
from registry.store import Store

log = structlog.get_logger(__name__)

_CHUNK_BYTES: Final = 2**20


class Adapters(adapter_pb2_grpc.AdapterServiceServicer):
    """Serves adapters from the store and their artifacts from the folder."""

    def __init__(
        self,
        store: Store,
        artifacts: ArtifactFolder,
        uploads: Uploads,
        imports: Imports,
        repacking: Repacking,
        pinning: Pinning,
        watches: Watches,
        reserve: SpaceReserve,
    ) -> None:
        self._store = store
        self._artifacts = artifacts
        self._uploads = uploads
        self._imports = imports
        self._repacking = repacking
        self._pinning = pinning
        self._watches = watches
        self._reserve = reserve

    async def UploadArtifact(self, request_iterator: Any, context: Any) -> adapter_pb2.UploadArtifactResponse:
        """Register a version of an adapter."""
        return await self._uploads.upload(aiter(request_iterator))

    async def FindUpload(self, request: adapter_pb2.FindUploadRequest, context: Any) -> adapter_pb2.FindUploadResponse:
        """Tell how much of files is here already."""
        return await self._uploads.find(request)

    async def ImportAdapter(
        self, request: adapter_pb2.ImportAdapterRequest, context: Any
    ) -> AsyncIterator[adapter_pb2.ImportAdapterResponse]:
        """Fetch and register a version of an adapter."""
        async for event in self._imports.run(request, context):
            yield event

    async def DownloadArtifact(
        self, request: adapter_pb2.DownloadArtifactRequest, context: Any
    ) -> AsyncIterator[adapter_pb2.DownloadArtifactResponse]:
        """Stream a packed file from an offset."""
        stream, size = await open_registered(self._store, self._artifacts, request.artifact_digest)
        with stream:
            if request.offset > size:
                raise InvalidParameter(
                    f"offset {request.offset} lies beyond the artifact's {size} bytes", field="offset", limit=size
                )
            yield adapter_pb2.DownloadArtifactResponse(info=adapter_pb2.ArtifactInfo(size_bytes=size))
            stream.seek(request.offset)
            while data := await asyncio.to_thread(stream.read, _CHUNK_BYTES):
                yield adapter_pb2.DownloadArtifactResponse(data=data)

    async def GetAdapter(self, request: adapter_pb2.GetAdapterRequest, context: Any) -> adapter_pb2.GetAdapterResponse:
        """Tell one adapter with all its versions."""
        name = check_adapter_name(request.name)
        async with self._store.read() as reader:
            adapter = await reader.adapter(DEFAULT_TENANT, name)
            reports = await reader.reports(DEFAULT_TENANT, name)
            evaluations = await reader.evaluations(DEFAULT_TENANT, name)
        if adapter is None:
            raise unknown_adapter(name)
        return adapter_pb2.GetAdapterResponse(
            adapter=adapter_message(adapter),
            reports=report_messages(adapter, reports),
            evaluations=evaluation_messages(adapter, evaluations),
        )

    async def ListAdapters(
        self, request: adapter_pb2.ListAdaptersRequest, context: Any
    ) -> adapter_pb2.ListAdaptersResponse:
        """List adapters by name."""
        size, after = page_size(request.page_size), decode_token("adapters", request.page_token)
        async with self._store.read() as reader:
            adapters = await reader.adapters(DEFAULT_TENANT, after, size + 1)
        token = encode_token("adapters", adapters[size - 1].name) if len(adapters) > size else ""
        return adapter_pb2.ListAdaptersResponse(
            adapters=[adapter_message(adapter, old_versions=False) for adapter in adapters[:size]],
            next_page_token=token,
        )

    async def UpdateAdapter(
        self, request: adapter_pb2.UpdateAdapterRequest, context: Any
    ) -> adapter_pb2.UpdateAdapterResponse:
        """Pack the current version of an adapter in another format."""
        return await self._repacking.update(request)

    async def RecordEvaluation(
        self, request: adapter_pb2.RecordEvaluationRequest, context: Any
    ) -> adapter_pb2.RecordEvaluationResponse:
        """Store what a worker measured of an artifact."""
        name, message = check_adapter_name(request.name), request.evaluation
        figures = check_figures(figures_of(message))
        async with self._store.write() as transaction:
            adapter = await transaction.adapter(DEFAULT_TENANT, name)
            if adapter is None:
                raise unknown_adapter(name)
            version, form = evaluated_version(
                adapter,
                version_digest=message.version_digest,
                artifact_digest=message.artifact_digest,
                exact_artifact_digest=message.exact_artifact_digest,
                base_digest=message.base_digest,
            )
            now_us = time.time_ns() // 1000
            record = EvaluationRecord(version.version_digest, message.artifact_digest, form, figures, now_us)
            await transaction.put_evaluation(adapter, record)
        log.info("registry.evaluation_recorded", name=name, artifact=record.artifact_digest[:12], format=form)
        return adapter_pb2.RecordEvaluationResponse(
            revision=transaction.revision, report=evaluation_message(record, version.base_digest)
        )

    async def PinAdapter(self, request: adapter_pb2.PinAdapterRequest, context: Any) -> adapter_pb2.PinAdapterResponse:
        """Pin an adapter to so many workers, or unpin it."""
        return await self._pinning.pin(request)

    async def DeleteAdapter(
        self, request: adapter_pb2.DeleteAdapterRequest, context: Any
    ) -> adapter_pb2.DeleteAdapterResponse:
        """Delete an adapter with its versions, and the artifacts that nothing else needs."""
        revision = await to_the_end(self._delete(check_adapter_name(request.name)))
        return adapter_pb2.DeleteAdapterResponse(revision=revision)

    async def _delete(self, name: str) -> int:
        with self._reserve.lent():
            async with self._store.write() as transaction:
                adapter = await transaction.adapter(DEFAULT_TENANT, name)
                if adapter is None:
                    raise unknown_adapter(name)
                await transaction.delete_adapter(DEFAULT_TENANT, name)
            log.info("registry.adapter_deleted", name=name, revision=transaction.revision)
            versions = adapter.versions
            digests = {digest for version in versions for digest in (version.artifact_digest, version.source_digest)}
            await collect(self._store, self._artifacts, digests)
        return transaction.revision

    async def Watch(self, request: adapter_pb2.WatchRequest, context: Any) -> AsyncIterator[adapter_pb2.WatchResponse]:
        """Stream the catalog."""
        async for event in self._watches.watch(request):
            yield event
