"""Packing registered versions again: in the format that is asked for, or because their packer is out of date.

The new artifact is published inside the write transaction that names it: whatever breaks off leaves the old one in its
place. The old artifact stays for a grace.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import structlog

from common.tenancy import DEFAULT_TENANT
from loraplex.errors import FailedPrecondition, LoraplexError
from loraplex.registry.v1 import adapter_pb2
from registry.artifacts import ArtifactFolder
from registry.domain import AdapterRecord, VersionRecord, check_adapter_name, outdated, put_repacked, unknown_adapter
from registry.packing import PackedVersion, Wanted, repack
from registry.reports import PackingReport
from registry.service.messages import adapter_message, asked_format, report_message
from registry.service.retirement import Retirement
from registry.service.tasks import to_the_end
from registry.store import Store

log = structlog.get_logger(__name__)


class Repacking:
    """Packs versions again, one at a time."""

    def __init__(
        self, store: Store, artifacts: ArtifactFolder, retirement: Retirement, default_quantization: str
    ) -> None:
        self._store = store
        self._artifacts = artifacts
        self._retirement = retirement
        self._default = default_quantization
        self._thread = ThreadPoolExecutor(1, "repack")

    def close(self) -> None:
        """Wait for the version in work."""
        self._thread.shutdown()

    async def update(self, request: adapter_pb2.UpdateAdapterRequest) -> adapter_pb2.UpdateAdapterResponse:
        """Serve one UpdateAdapter."""
        name, form = check_adapter_name(request.name), asked_format(request.format, required=True)
        async with self._store.read() as reader:
            existing = await reader.adapter(DEFAULT_TENANT, name)
            reports = await reader.reports(DEFAULT_TENANT, name)
            head = await reader.head()
        if existing is None:
            raise unknown_adapter(name)
        version = existing.current_version
        if version.format == form and outdated(version, form) is None and version.version_digest in reports:
            return adapter_pb2.UpdateAdapterResponse(
                adapter=adapter_message(existing),
                revision=head.revision,
                changed=False,
                report=report_message(version.version_digest, reports[version.version_digest]),
            )
        adapter, report, revision = await self._repack(name, version, Wanted(form, asked=True))
        log.info("registry.adapter_updated", name=name, version=version.version_digest[:12], format=form)
        return adapter_pb2.UpdateAdapterResponse(
            adapter=adapter_message(adapter),
            revision=revision,
            changed=True,
            report=report_message(version.version_digest, report),
        )

    async def update_outdated(self) -> None:
        """Pack all versions again whose packer is out of date; what cannot be is logged and left as it is."""
        try:
            async with self._store.read() as reader:
                adapters = await reader.adapters(DEFAULT_TENANT)
        except LoraplexError as error:
            log.warning("registry.repack_failed", error=str(error))
            return
        due = [
            (adapter.name, version, form)
            for adapter in adapters
            for version in adapter.versions
            if (form := outdated(version, self._default)) is not None
        ]
        if not due:
            return
        log.info("registry.repacking", versions=len(due))
        started, num_failed = time.monotonic(), 0
        for done, (name, version, form) in enumerate(due, 1):
            where = {"name": name, "version": version.version_digest[:12], "done": f"{done}/{len(due)}"}
            try:
                _, report, _ = await self._repack(name, version, Wanted(form, asked=False))
            except (LoraplexError, OSError) as error:
                num_failed += 1
                log.warning("registry.repack_failed", **where, error=str(error))
            else:
                worst = report.errors[:1]
                log.info("registry.repacked", **where, format=report.format, mean_error=report.mean_error, worst=worst)
        seconds = round(time.monotonic() - started, 3)
        log.info("registry.repacking_ended", versions=len(due), failed=num_failed, seconds=seconds)

    async def _repack(
        self, name: str, version: VersionRecord, wanted: Wanted
    ) -> tuple[AdapterRecord, PackingReport, int]:
        """Return the adapter with its new artifact, the report and the revision."""
        folder = await asyncio.to_thread(self._artifacts.new_incoming)
        try:
            return await to_the_end(self._pack_and_commit(name, version, wanted, folder))
        finally:
            await to_the_end(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))

    async def _pack_and_commit(
        self, name: str, version: VersionRecord, wanted: Wanted, folder: Path
    ) -> tuple[AdapterRecord, PackingReport, int]:
        def pack() -> PackedVersion:
            self._artifacts.require_space(version.source_bytes)
            return repack(version, wanted, folder, self._artifacts)

        packed = await asyncio.get_running_loop().run_in_executor(self._thread, pack)
        async with self._store.write() as transaction:
            existing = await transaction.adapter(DEFAULT_TENANT, name)
            versions = existing.versions if existing else ()
            stored = next((v for v in versions if v.version_digest == version.version_digest), None)
            if existing is None or stored is None:
                raise unknown_adapter(name)
            if stored != version and not wanted.asked:
                raise FailedPrecondition(f"another format was chosen for {name} meanwhile")
            for digest, file in packed.files.items():
                await asyncio.to_thread(self._artifacts.publish, file, digest)
            adapter = put_repacked(existing, packed.version)
            before = (await transaction.reports(DEFAULT_TENANT, name)).get(version.version_digest)
            report = replace(packed.report, facts=before.facts if before else None)
            await transaction.put_adapter(adapter, {version.version_digest: report})
        self._retirement.retire({stored.artifact_digest})
        return adapter, report, transaction.revision
