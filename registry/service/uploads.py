"""UploadArtifact: receives an adapter's files into a private folder that goes away whatever happens.

What an upload that breaks off has brought is kept for a while, so that its client can go on (see `partials`).

What they become is `registering`'s; the grammar of the stream is `receiver`'s.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

from loraplex.errors import DeadlineExceeded, InvalidRequest
from loraplex.registry.v1 import adapter_pb2
from registry.artifacts import ArtifactFolder
from registry.incoming import ReceivedFiles
from registry.partials import PartialUploads
from registry.service.receiver import Truncated, UploadReceiver, found
from registry.service.registering import Registering
from registry.service.tasks import to_the_end
from registry.service.turns import Turns
from registry.settings import RegistrySettings

_Parts = AsyncIterator[adapter_pb2.UploadArtifactRequest]


class Uploads:
    """Owns the uploads in progress."""

    def __init__(
        self,
        artifacts: ArtifactFolder,
        partials: PartialUploads,
        registering: Registering,
        settings: RegistrySettings,
    ) -> None:
        self._artifacts = artifacts
        self._partials = partials
        self._broken = asyncio.Event()
        self._registering = registering
        self._max_upload_bytes = settings.max_upload_bytes
        self._idle_timeout_s = settings.upload_idle_timeout_s
        self._turns = Turns(settings.max_concurrent_uploads, settings.upload_idle_timeout_s, "uploads")

    async def find(self, request: adapter_pb2.FindUploadRequest) -> adapter_pb2.FindUploadResponse:
        """Serve one FindUpload."""
        return await asyncio.to_thread(found, request, self._partials)

    async def forget_old(self) -> None:
        """Remove what broken uploads left behind, when its time is up, until cancelled."""
        while True:
            self._broken.clear()
            due_s = await asyncio.to_thread(self._partials.drop_old)
            with suppress(TimeoutError):
                async with asyncio.timeout(due_s):
                    await self._broken.wait()

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
        receiver = UploadReceiver(folder, self._artifacts, self._partials, max_upload_bytes=self._max_upload_bytes)
        try:
            while (part := await self._next(parts)) is not None:
                await to_the_end(asyncio.to_thread(receiver.take, part))
            return await to_the_end(asyncio.to_thread(receiver.finish))
        except (asyncio.CancelledError, DeadlineExceeded, Truncated):  # the client has gone, or its network
            await to_the_end(asyncio.to_thread(receiver.keep))
            self._broken.set()
            raise
        finally:
            receiver.close()

    async def _next(self, parts: _Parts) -> adapter_pb2.UploadArtifactRequest | None:
        """Return the next part, None at the end. Raises DeadlineExceeded where none comes."""
        try:
            async with asyncio.timeout(self._idle_timeout_s):
                return await anext(parts, None)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the upload stood still for {self._idle_timeout_s:g} s; start it again") from error
