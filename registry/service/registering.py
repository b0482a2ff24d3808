"""From an adapter's two files to a new current version, or to nothing at all: what uploads and imports share.

Validates and packs in worker threads, and publishes the artifact inside the write transaction that names it: no version
without its file. A crash between the two leaves at most a file that no version names, which the next start removes.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from common.adapter_format.base import BaseLinears, read_linears
from common.adapter_format.validate import examine
from common.tenancy import DEFAULT_TENANT
from common.wording import listing
from loraplex.errors import AlreadyExists, FailedPrecondition, InvalidParameter
from loraplex.manifest import manifest_from_json
from loraplex.registry.v1 import adapter_pb2
from registry.artifacts import ArtifactFolder
from registry.base_folders import BaseFolders
from registry.domain import AdapterRecord, check_adapter_name, check_same_base, cut_over
from registry.incoming import ReceivedFiles
from registry.limits import AdapterLimits, check_limits, check_room
from registry.packing import PackedVersion, Wanted, make_version
from registry.pins import with_listed_pin
from registry.service.base_models import unknown_base
from registry.service.messages import adapter_message, asked_format, report_message
from registry.service.retirement import Retirement
from registry.service.tasks import to_the_end
from registry.settings import RegistrySettings
from registry.store import Reader, Store

log = structlog.get_logger(__name__)

_VALIDATION_THREADS: Final = 2  # validation hashes and scans whole adapters; the rest of the registry needs CPU too


@dataclass(frozen=True, slots=True)
class Target:
    """What admitted files will be a version of."""

    name: str
    base_id: str
    manifest: str
    asked_format: str
    """none, int8 or int4; empty where the client leaves it to the registry."""
    known_formats: Mapping[str, str]
    """Formats of the name's versions, by version digest."""


class Registering:
    """Owns the threads that validate and the way into the store."""

    def __init__(
        self, store: Store, artifacts: ArtifactFolder, retirement: Retirement, settings: RegistrySettings
    ) -> None:
        self._store = store
        self._artifacts = artifacts
        self._retirement = retirement
        self._base_folders = BaseFolders(settings.base_folders, settings.state_dir / "cache")
        self._default_quantization = settings.default_quantization
        self._pins = settings.pins
        self._limits = settings.adapter_limits
        self._validators = ThreadPoolExecutor(_VALIDATION_THREADS, "validate")

    def close(self) -> None:
        """Stop the worker threads; nothing may be registered any more."""
        self._validators.shutdown()

    async def admit(self, name: str, base_id: str, asked: int) -> Target:
        """Check all that can be checked before any data comes; `asked` is a message's format."""
        async with self._store.read() as reader:
            return await self._admit(check_adapter_name(name), base_id, asked_format(asked), reader)

    async def _admit(self, name: str, base_id: str, form: str, reader: Reader) -> Target:
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
        existing = await _check_name_is_free(reader, name, base_id, self._limits)
        known_formats = {version.version_digest: version.format for version in existing.versions} if existing else {}
        return Target(name, base_id, manifest, form, known_formats)

    async def register(
        self, files: ReceivedFiles, target: Target, folder: Path, *, origin: str = "", started: float
    ) -> adapter_pb2.UploadArtifactResponse:
        """Make a version of whole files; `folder` is for what is made on the way, `started` is monotonic seconds."""
        packed = await self._in_validator(lambda: self._make_version(files, target, folder))
        packed = replace(packed, version=replace(packed.version, origin=origin))
        response = await to_the_end(self._commit(target, packed))
        log.info(
            "registry.adapter_registered",
            name=target.name,
            version=packed.version.version_digest[:12],
            artifact=packed.version.artifact_digest[:12],
            source=origin or "upload",
            format=packed.version.format,
            mean_error=packed.report.mean_error,
            changed=response.changed,
            revision=response.revision,
            seconds=round(time.monotonic() - started, 3),
        )
        return response

    def _make_version(self, files: ReceivedFiles, target: Target, folder: Path) -> PackedVersion:
        """Validate, pack and sync; blocks."""
        base: BaseLinears = read_linears(manifest_from_json(target.manifest))
        weights = partial(self._base_folders.weights, base.base_digest)
        validated = examine(files.config, files.weights, base, weights)
        check_limits(validated.adapter, self._limits)
        default = target.known_formats.get(validated.adapter.version_digest, self._default_quantization)
        wanted = Wanted(target.asked_format or default, asked=bool(target.asked_format))
        return make_version(validated, wanted, base, folder, self._artifacts, time.time_ns() // 1000)

    async def _commit(self, target: Target, packed: PackedVersion) -> adapter_pb2.UploadArtifactResponse:
        async with self._store.write() as transaction:
            existing = await _check_name_is_free(transaction, target.name, target.base_id, self._limits)
            adapter = with_listed_pin(cut_over(existing, target.name, target.base_id, packed.version), self._pins)
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

    async def _in_validator(self, work: Callable[[], PackedVersion]) -> PackedVersion:
        async def run() -> PackedVersion:
            return await asyncio.get_running_loop().run_in_executor(self._validators, work)

        return await to_the_end(run())

    @asynccontextmanager
    async def folder(self) -> AsyncIterator[Path]:
        """Lend a folder that is removed whatever happens."""
        folder = await to_the_end(asyncio.to_thread(self._artifacts.new_incoming))
        try:
            yield folder
        finally:
            await to_the_end(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))


async def _check_name_is_free(reader: Reader, name: str, base_id: str, limits: AdapterLimits) -> AdapterRecord | None:
    """Return the adapter that has the name.

    Refuse one that means something else, a base or an adapter of another, and a new one where no more may be.
    """
    if await reader.base(name) is not None:
        raise AlreadyExists(f"{name} is the id of a base model; choose another name", field="name")
    existing = await reader.adapter(DEFAULT_TENANT, name)
    if existing is None:
        check_room(await reader.num_adapters(DEFAULT_TENANT), limits)
    else:
        check_same_base(existing, base_id)
    return existing
