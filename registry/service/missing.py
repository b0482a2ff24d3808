"""Artifacts that the database knows and the artifact folder lacks: told at start and to whoever asks for one.

Registries may share a database and never a folder. So a second one on a database, or one whose folder was lost, knows
adapters that it cannot hand out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import BinaryIO

import structlog

from loraplex.errors import ArtifactNotFound
from registry.artifacts import MISSING_REMEDY, ArtifactFolder
from registry.store import Store

log = structlog.get_logger(__name__)


async def warn_of_missing(store: Store, artifacts: ArtifactFolder, present: Collection[str]) -> None:
    """Log how many artifacts of registered versions are not among those `present`."""
    async with store.read() as reader:
        missing = sorted(await reader.artifact_digests() - set(present))
    if missing:
        log.warning(
            "registry.artifacts_missing",
            count=len(missing),
            first=missing[0],
            folder=str(artifacts.folder),
            remedy=MISSING_REMEDY,
        )


async def open_registered(store: Store, artifacts: ArtifactFolder, digest: str) -> tuple[BinaryIO, int]:
    """Open an artifact as ArtifactFolder does.

    Raises InvalidParameter for what is no digest, ArtifactNotFound for what no version names, and ArtifactUnreachable
    for what one does.
    """
    try:
        return await asyncio.to_thread(artifacts.open_artifact, digest)
    except ArtifactNotFound:
        async with store.read() as reader:
            if not await reader.referenced([digest]):
                raise
    try:  # it may have been published in between
        return await asyncio.to_thread(artifacts.open_artifact, digest)
    except ArtifactNotFound as error:
        raise artifacts.missing(digest) from error
