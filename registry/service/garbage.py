"""Removal of artifacts that no version names."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import structlog

from registry.artifacts import ArtifactFolder
from registry.store import Store

log = structlog.get_logger(__name__)


async def collect(store: Store, artifacts: ArtifactFolder, candidates: Collection[str]) -> int:
    """Remove those of the digests that no version names; returns how many.

    Asks and removes under the write lock, so that an upload of the same content either still sees the file replaced
    or comes afterwards and brings its own. Downloads that are running keep their open file.
    """
    if not candidates:
        return 0
    async with store.write() as transaction:  # changes nothing and takes no revision; holds the lock
        unreferenced = set(candidates) - await transaction.referenced(candidates)
        for digest in unreferenced:
            try:
                await asyncio.to_thread(artifacts.remove, digest)
            except OSError:  # the caller's work is done; the next start tries again
                log.warning("registry.artifact_not_removed", artifact=digest, exc_info=True)
    if unreferenced:
        log.info("registry.artifacts_removed", count=len(unreferenced))
    return len(unreferenced)
