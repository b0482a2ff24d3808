"""UploadArtifact: receives an adapter's files into a private folder that goes away whatever happens.

What they become is `registering`'s; the grammar of the stream is `receiver`'s.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

from loraplex.errors import DeadlineExceeded, InvalidRequest
from loraplex.registry.v1 import adapter_pb2
from registry.artifacts import ArtifactFolder
from registry.incoming import ReceivedFiles
from registry.service.receiver import UploadReceiver
from registry.service.registering import Registering
from registry.service.tasks import to_the_end
from registry.service.turns import Turns
from registry.settings import RegistrySettings

_Parts = AsyncIterator[adapter_pb2.UploadArtifactRequest]


class Uploads:
    """Owns the uploads in progress."""

    def __init__(self, artifacts: ArtifactFolder, registering: Registering, settings: RegistrySettings) -> None:
        self._artifacts = artifacts
        self._registering = registering
        self._max_upload_bytes = settings.max_upload_bytes
        self._idle_timeout_s = settings.upload_idle_timeout_s
        self._turns = Turns(settings.max_concurrent_uploads, settings.upload_idle_timeout_s, "uploads")

    async def close(self) -> None:
        """Wait until all uploads have ended, each cleaned up."""
        await self._turns.ended()

    async def upload(self, parts: _Parts) -> adapter_pb2.UploadArtifactResponse:
        """Serve one call."""
        started = time.monotonic()
        first = await self._next(parts)
        if first is None or first.WhichOneof("part") != "header":
            raise InvalidRequest("an upload starts with a header: the adapter's name and base", field="header")
        header = first.header
        target = await self._registering.admit(header.name, header.base_id, header.format)
        async with self._turns.one(), self._registering.folder() as folder:
            files = await self._receive(parts, folder)
            return await self._registering.register(files, target, folder, started=started)

    async def _receive(self, parts: _Parts, folder: Path) -> ReceivedFiles:
        receiver = UploadReceiver(folder, self._artifacts, max_upload_bytes=self._max_upload_bytes)
        try:
            while (part := await self._next(parts)) is not None:
                await to_the_end(asyncio.to_thread(receiver.take, part))
            return await to_the_end(asyncio.to_thread(receiver.finish))
        finally:
            receiver.close()

    async def _next(self, parts: _Parts) -> adapter_pb2.UploadArtifactRequest | None:
        """Return the next part, None at the end. Raises DeadlineExceeded where none comes."""
        try:
            async with asyncio.timeout(self._idle_timeout_s):
                return await anext(parts, None)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the upload stood still for {self._idle_timeout_s:g} s; start it again") from error
