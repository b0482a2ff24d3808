"""UploadArtifact: from a stream of parts to a new current version, or to nothing at all.

Receives into a private folder that goes away whatever happens, validates and packs in worker threads, and publishes
the artifact inside the write transaction that names it: no version without its file. A crash between the two leaves
at most a file that no version names, which the next start removes.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from common.adapter_format.base import BaseLinears, read_linears
from common.adapter_format.validate import examine
from common.tenancy import DEFAULT_TENANT
from common.wording import listing
from loraplex.errors import (
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidParameter,
    InvalidRequest,
    ResourceExhausted,
)
from loraplex.manifest import manifest_from_json
from loraplex.registry.v1 import adapter_pb2
from registry.artifacts import ArtifactFolder
from registry.base_folders import BaseFolders
from registry.domain import AdapterRecord, check_adapter_name, check_same_base, cut_over
from registry.packing import PackedVersion, Wanted, make_version
from registry.service.base_models import unknown_base
from registry.service.messages import adapter_message, asked_format, report_message
from registry.service.receiver import ReceivedFiles, UploadReceiver
from registry.service.retirement import Retirement
from registry.service.tasks import to_the_end
from registry.settings import RegistrySettings
from registry.store import Reader, Store

log = structlog.get_logger(__name__)

_VALIDATION_THREADS: Final = 2  # validation hashes and scans whole adapters; the rest of the registry needs CPU too
_Parts = AsyncIterator[adapter_pb2.UploadArtifactRequest]


@dataclass(frozen=True, slots=True)
class _Target:
    """What an admitted upload will be a version of."""

    name: str
    base_id: str
    manifest: str
    asked_format: str
    """none, int8 or int4; empty where the client leaves it to the registry."""
    known_formats: Mapping[str, str]
    """Formats of the name's versions, by version digest."""


class Uploads:
    """Owns the uploads in progress."""

    def __init__(
        self, store: Store, artifacts: ArtifactFolder, retirement: Retirement, settings: RegistrySettings
    ) -> None:
        self._store = store
        self._artifacts = artifacts
        self._retirement = retirement
        self._base_folders = BaseFolders(settings.base_folders, settings.state_dir / "cache")
        self._default_quantization = settings.default_quantization
        self._max_upload_bytes = settings.max_upload_bytes
        self._idle_timeout_s = settings.upload_idle_timeout_s
        self._num_places = settings.max_concurrent_uploads
        self._places = asyncio.Semaphore(self._num_places)
        self._validators = ThreadPoolExecutor(_VALIDATION_THREADS, "validate")

    async def close(self) -> None:
        """Wait until all uploads have ended, each cleaned up, and stop the worker threads."""
        for _ in range(self._num_places):
            await self._places.acquire()
        self._validators.shutdown()

    async def upload(self, parts: _Parts) -> adapter_pb2.UploadArtifactResponse:
        """Serve one call."""
        started = time.monotonic()
        first = await self._next(parts)
        if first is None or first.WhichOneof("part") != "header":
            raise InvalidRequest("an upload starts with a header: the adapter's name and base", field="header")
        async with self._store.read() as reader:
            target = await self._admit(first.header, reader)
        async with self._place(), self._folder() as folder:
            files = await self._receive(parts, folder)
            packed = await self._in_validator(lambda: self._make_version(files, target, folder))
            response = await to_the_end(self._commit(target, packed))
        log.info(
            "registry.adapter_uploaded",
            name=target.name,
            version=packed.version.version_digest[:12],
            artifact=packed.version.artifact_digest[:12],
            format=packed.version.format,
            mean_error=packed.report.mean_error,
            changed=response.changed,
            revision=response.revision,
            seconds=round(time.monotonic() - started, 3),
        )
        return response

    async def _admit(self, header: adapter_pb2.UploadHeader, reader: Reader) -> _Target:
        """Check all that can be checked before any data comes."""
        name, base_id, form = check_adapter_name(header.name), header.base_id, asked_format(header.format)
        if not base_id:
            bases = [base.base_id for base in await reader.bases()]
            if not bases:
                raise FailedPrecondition("no base model is registered yet; add one first: loraplex base add DIR")
            if len(bases) > 1:
                raise InvalidParameter(
                    f"several base models are registered ({listing(bases)}); say which the adapter belongs to",
                    field="base_id",
                )
            base_id = bases[0]
        manifest = await reader.manifest(base_id)
        if manifest is None:
            raise unknown_base(base_id, await reader.bases())
        existing = await _check_name_is_free(reader, name, base_id)
        known_formats = {version.version_digest: version.format for version in existing.versions} if existing else {}
        return _Target(name, base_id, manifest, form, known_formats)

    async def _receive(self, parts: _Parts, folder: Path) -> ReceivedFiles:
        receiver = UploadReceiver(folder, self._artifacts, max_upload_bytes=self._max_upload_bytes)
        try:
            while (part := await self._next(parts)) is not None:
                await to_the_end(asyncio.to_thread(receiver.take, part))
            return await to_the_end(asyncio.to_thread(receiver.finish))
        finally:
            receiver.close()

    def _make_version(self, files: ReceivedFiles, target: _Target, folder: Path) -> PackedVersion:
        """Validate, pack and sync; blocks."""
        base: BaseLinears = read_linears(manifest_from_json(target.manifest))
        weights = partial(self._base_folders.weights, base.base_digest)
        validated = examine(files.config, files.weights, base, weights)
        default = target.known_formats.get(validated.adapter.version_digest, self._default_quantization)
        wanted = Wanted(target.asked_format or default, asked=bool(target.asked_format))
        return make_version(validated, wanted, base, folder, self._artifacts, time.time_ns() // 1000)

    async def _commit(self, target: _Target, packed: PackedVersion) -> adapter_pb2.UploadArtifactResponse:
        async with self._store.write() as transaction:
            existing = await _check_name_is_free(transaction, target.name, target.base_id)
            adapter = cut_over(existing, target.name, target.base_id, packed.version)
            # Also where nothing changes: an artifact that was lost comes back by registering it again.
            for digest, file in packed.files.items():
                await asyncio.to_thread(self._artifacts.publish, file, digest)
            if adapter is not existing:
                await transaction.put_adapter(adapter, {packed.version.version_digest: packed.report})
        if existing:
            self._retirement.retire({v.artifact_digest for v in existing.versions if v not in adapter.versions})
        return adapter_pb2.UploadArtifactResponse(
            adapter=adapter_message(adapter),
            revision=transaction.revision,
            changed=adapter is not existing,
            report=report_message(packed.version.version_digest, packed.report),
        )

    async def _next(self, parts: _Parts) -> adapter_pb2.UploadArtifactRequest | None:
        """Return the next part, None at the end. Raises DeadlineExceeded where none comes."""
        try:
            async with asyncio.timeout(self._idle_timeout_s):
                return await anext(parts, None)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the upload stood still for {self._idle_timeout_s:g} s; start it again") from error

    async def _in_validator(self, work: Callable[[], PackedVersion]) -> PackedVersion:
        async def run() -> PackedVersion:
            return await asyncio.get_running_loop().run_in_executor(self._validators, work)

        return await to_the_end(run())

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """Wait for one of the places of concurrent uploads."""
        try:
            async with asyncio.timeout(self._idle_timeout_s):
                await self._places.acquire()
        except TimeoutError as error:
            raise ResourceExhausted("too many uploads at a time; try again later", retry_after_s=1.0) from error
        try:
            yield
        finally:
            self._places.release()

    @asynccontextmanager
    async def _folder(self) -> AsyncIterator[Path]:
        """Lend a folder that is removed whatever happens."""
        folder = await asyncio.to_thread(self._artifacts.new_incoming)
        try:
            yield folder
        finally:
            await to_the_end(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))


async def _check_name_is_free(reader: Reader, name: str, base_id: str) -> AdapterRecord | None:
    """Return the adapter that has the name. Refuse one that means something else: a base, an adapter of another."""
    if await reader.base(name) is not None:
        raise AlreadyExists(f"{name} is the id of a base model; choose another name", field="name")
    existing = await reader.adapter(DEFAULT_TENANT, name)
    if existing is not None:
        check_same_base(existing, base_id)
    return existing
