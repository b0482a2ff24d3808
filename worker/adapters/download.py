"""One artifact's way from the source to a verified file: resumed where it broke off, checked against its digest.

What comes out has every byte on the disk and the right SHA-256; a failure leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import structlog

from common.backoff import Backoff
from common.disk import is_full
from loraplex.errors import ArtifactUnreachable, CorruptArtifact, LoraplexError
from worker.adapters.full_disk import PAUSE, no_space
from worker.adapters.source import ArtifactSource, SourceInterrupted

log = structlog.get_logger(__name__)

_BACKOFF: Final = Backoff(first_s=0.1, longest_s=2.0)
_RNG: Final = random.Random()  # noqa: S311 - spreads load, no secret


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long to try without a byte of progress: how many times in a row, with which pauses, for how many seconds."""

    tries: int = 6
    backoff: Backoff = _BACKOFF
    stall_s: float = 60.0


class Partial:
    """A file on its way, hashed as it grows. Methods block: call them on a thread. Closing twice is harmless."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size_bytes = 0
        self._sha256 = hashlib.sha256()
        self._lock = threading.Lock()  # a cancelled download closes the file while a thread may still write
        self._file: BinaryIO | None = path.open("xb")

    def append(self, chunk: bytes) -> None:
        """Write and hash a chunk. Does nothing after `close`."""
        with self._lock:
            if self._file is not None:
                self._file.write(chunk)
                self._sha256.update(chunk)
                self.size_bytes += len(chunk)

    def digest(self) -> str:
        """Return the SHA-256 of what was appended, lower-case hex."""
        return self._sha256.hexdigest()

    def seal(self) -> None:
        """Bring every byte to the disk; nothing can be appended any more."""
        with self._lock:
            if self._file is None:
                raise RuntimeError("sealed after close")
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def close(self) -> None:
        """Drop the file."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None
            self.path.unlink(missing_ok=True)


async def download(
    source: ArtifactSource,
    artifact_digest: str,
    scratch: Path,
    *,
    reserve: Callable[[int], Awaitable[None]],
    retry: RetryPolicy,
    on_bytes: Callable[[int], None] = lambda _: None,
    on_failure: Callable[[], None] = lambda: None,
) -> Partial:
    """Fetch an artifact into `scratch`; returns it sealed and verified, for the caller to give it its place.

    `reserve` is told the size once, before the first byte is written, and may wait or raise; `on_bytes` hears how many
    bytes came, `on_failure` of a try that brought none. Raises ArtifactNotFound, ArtifactUnreachable after the last try
    or a stall, CorruptArtifact, OSError, or whatever `reserve` raises.
    """
    partial = Partial(scratch)
    try:
        stalled = asyncio.timeout(retry.stall_s)

        async def reserve_in_peace(size_bytes: int) -> None:
            stalled.reschedule(None)
            await reserve(size_bytes)
            got(0)

        def got(num_bytes: int) -> None:
            stalled.reschedule(asyncio.get_running_loop().time() + retry.stall_s)
            on_bytes(num_bytes)

        try:
            async with stalled:
                await _receive(source, artifact_digest, partial, reserve_in_peace, retry, got, on_failure)
        except TimeoutError as error:
            if not stalled.expired():
                raise
            raise ArtifactUnreachable(
                f"adapter artifact {artifact_digest[:12]} is not cached here and its source sent nothing for "
                f"{retry.stall_s:g} s; try again later",
                artifact_digest=artifact_digest,
                retry_after_s=retry.backoff.longest_s,
            ) from error
        _check_digest(partial, artifact_digest)
        await asyncio.to_thread(partial.seal)
    except BaseException:
        await asyncio.to_thread(partial.close)
        raise
    return partial


async def _receive(
    source: ArtifactSource,
    artifact_digest: str,
    partial: Partial,
    reserve: Callable[[int], Awaitable[None]],
    retry: RetryPolicy,
    got: Callable[[int], None],
    on_failure: Callable[[], None],
) -> None:
    size_bytes: int | None = None
    failures = 0
    while size_bytes is None or partial.size_bytes < size_bytes:
        before = partial.size_bytes
        try:
            async with source.open(artifact_digest, before) as stream:
                if size_bytes is None:
                    size_bytes = stream.size_bytes
                    await reserve(size_bytes)
                if stream.size_bytes != size_bytes:
                    raise _wrong_size(artifact_digest, stream.size_bytes, size_bytes)
                async for chunk in stream.chunks:
                    if partial.size_bytes + len(chunk) > size_bytes:
                        raise _wrong_size(artifact_digest, partial.size_bytes + len(chunk), size_bytes)
                    await asyncio.to_thread(partial.append, chunk)
                    got(len(chunk))
            interruption = SourceInterrupted(f"it ended after {partial.size_bytes} of {size_bytes} bytes")
        except SourceInterrupted as error:
            interruption = error
        if partial.size_bytes == size_bytes:
            return
        if partial.size_bytes > before:
            failures = 1
        else:
            failures += 1
            on_failure()
        if failures >= retry.tries:
            raise ArtifactUnreachable(
                f"adapter artifact {artifact_digest[:12]} is not cached here and its source cannot be reached "
                f"({interruption}); try again later",
                artifact_digest=artifact_digest,
                retry_after_s=retry.backoff.longest_s,
            ) from interruption
        log.info("artifact.interrupted", artifact=artifact_digest[:12], at=partial.size_bytes, why=str(interruption))
        await asyncio.sleep(retry.backoff.jittered_s(failures, _RNG))


def _check_digest(partial: Partial, artifact_digest: str) -> None:
    if partial.digest() != artifact_digest:
        raise CorruptArtifact(
            f"artifact {artifact_digest} came with other bytes than its digest says; they were thrown away",
            artifact_digest=artifact_digest,
        )


def _wrong_size(artifact_digest: str, got: int, expected: int) -> CorruptArtifact:
    return CorruptArtifact(
        f"artifact {artifact_digest} has {got} bytes where {expected} were announced", artifact_digest=artifact_digest
    )


def disk_error(error: OSError, folder: Path) -> LoraplexError:
    """Return the typed error for a failure of the cache's disk."""
    if is_full(error):
        return no_space(folder, PAUSE.longest_s)
    return ArtifactUnreachable(f"the adapter cache {folder} cannot be written: {error.strerror or error}")
