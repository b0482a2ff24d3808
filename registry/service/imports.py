"""ImportAdapter: the registry fetches an adapter itself, tells how far it is, and registers it.

An import ends with its call: a client that leaves takes it along. It has places of its own, so that sources that stand
still hold up no upload.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, Final

from loraplex.digests import is_digest
from loraplex.errors import InvalidParameter
from loraplex.registry.v1 import adapter_pb2
from registry.artifacts import ArtifactFolder
from registry.service.fetching import Fetch, Progress
from registry.service.registering import Registering
from registry.service.turns import Turns
from registry.settings import RegistrySettings
from registry.sources.places import Places

_TELL_S: Final = 0.2
"""Between two messages of progress."""


class Imports:
    """Owns the imports in progress."""

    def __init__(self, artifacts: ArtifactFolder, registering: Registering, settings: RegistrySettings) -> None:
        self._artifacts = artifacts
        self._registering = registering
        self._limits = settings.fetch_limits(settings.max_upload_bytes)
        self._places = Places(settings.source_rules, settings.max_concurrent_imports)
        self._turns = Turns(settings.max_concurrent_imports, settings.import_stall_s, "imports")

    async def close(self) -> None:
        """Wait until all imports have ended, each cleaned up."""
        await self._turns.ended()
        self._places.close()

    async def run(
        self, request: adapter_pb2.ImportAdapterRequest, context: Any
    ) -> AsyncIterator[adapter_pb2.ImportAdapterResponse]:
        """Serve one call."""
        telling = _Telling()
        task = asyncio.create_task(self._import(request, telling))
        # gRPC says so at once; a generator that is suspended in a write hears of it late.
        context.add_done_callback(lambda _: task.cancel())
        try:
            async for progress in telling.until(task):
                yield adapter_pb2.ImportAdapterResponse(progress=progress)
            yield adapter_pb2.ImportAdapterResponse(registered=await task)
        finally:
            task.add_done_callback(_seen)
            task.cancel()

    async def _import(
        self, request: adapter_pb2.ImportAdapterRequest, telling: _Telling
    ) -> adapter_pb2.UploadArtifactResponse:
        started = time.monotonic()
        source = self._places.source(request.source)
        if request.weights_sha256 and not is_digest(request.weights_sha256):
            raise InvalidParameter(
                "weights_sha256 is no SHA-256; give its 64 hex digits in lower case, or leave it out",
                field="weights_sha256",
            )
        target = await self._registering.admit(request.name, request.base_id, request.format)
        async with self._turns.one(), self._registering.folder() as folder:
            fetch = Fetch(source, folder, self._artifacts, self._limits, telling.tell, request.weights_sha256)
            files = await fetch.run()
            return await self._registering.register(files, target, folder, origin=fetch.origin, started=started)


def _seen(task: asyncio.Task[Any]) -> None:
    """Take note of how a task ended whose caller has left."""
    if not task.cancelled():
        task.exception()


class _Telling:
    """The newest progress, for one reader that may be slow."""

    def __init__(self) -> None:
        self._newest: Progress | None = None
        self._changed = asyncio.Event()

    def tell(self, progress: Progress) -> None:
        """Put it in the place of what is not read yet."""
        self._newest = progress
        self._changed.set()

    async def until(self, task: asyncio.Task[Any]) -> AsyncIterator[adapter_pb2.ImportProgress]:
        """Yield what is new, not too often, until the task is done."""
        task.add_done_callback(lambda _: self._changed.set())
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._newest is not None:
                newest, self._newest = self._newest, None
                yield adapter_pb2.ImportProgress(
                    source=newest.origin, received_bytes=newest.received_bytes, total_bytes=newest.total_bytes
                )
            if task.done():
                return
            await asyncio.wait({task}, timeout=_TELL_S)
