"""From a source to two whole files in a folder, within limits and deadlines, or to a refusal that says why.

What breaks off is tried again after a pause and goes on where it was; only tries without progress count. Sizes are held
against the limit before the first byte and with every one. Whatever is fetched lies in the folder that the caller
removes, so nothing is left of an import that fails or is cancelled.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from common.backoff import Backoff
from loraplex.errors import CorruptArtifact, SourceTimeout, SourceUnreachable, TooLarge
from loraplex.peft_folder import CONFIG_FILE, WEIGHTS_FILE
from registry.artifacts import ArtifactFolder
from registry.incoming import MAX_CONFIG_BYTES, IncomingFile, ReceivedFiles
from registry.service.tasks import to_the_end
from registry.sources.source import Opened, Source

log = structlog.get_logger(__name__)

MAX_TRIES: Final = 4
"""Without progress, before a source is given up."""
PAUSE: Final = Backoff(first_s=0.25, longest_s=4.0)
_WRITE_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """What an import may take: bytes of all files, seconds in all, and seconds in which nothing comes."""

    max_bytes: int
    total_s: float
    stall_s: float


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a fetch is; `total_bytes` counts the files whose size is known."""

    origin: str
    received_bytes: int
    total_bytes: int


class _Stalled(Exception):
    """Nothing came for too long."""


class Fetch:
    """One import's way in. `on_progress` is called on the event loop.

    The weights must have the SHA-256 that is asked for, where one is.
    """

    def __init__(
        self,
        source: Source,
        folder: Path,
        artifacts: ArtifactFolder,
        limits: FetchLimits,
        on_progress: Callable[[Progress], None] = lambda _: None,
        weights_sha256: str = "",
    ) -> None:
        self._source = source
        self._folder = folder
        self._artifacts = artifacts
        self._limits = limits
        self._on_progress = on_progress
        self._weights_sha256 = weights_sha256
        self._rng = random.Random()  # noqa: S311 - jitter, not a secret
        self._whole_bytes = 0  # of the files that are whole
        self.origin = ""

    async def run(self) -> ReceivedFiles:
        """Fetch both files.

        Raises the errors of sources, SourceTimeout, SourceUnreachable, TooLarge, CorruptArtifact and NoSpace.
        """
        try:
            async with asyncio.timeout(self._limits.total_s) as deadline:
                self.origin = await self._locate()
                config = await self._file(CONFIG_FILE, min(MAX_CONFIG_BYTES, self._limits.max_bytes))
                limit_bytes = self._limits.max_bytes - self._whole_bytes
                weights = await self._file(WEIGHTS_FILE, limit_bytes, self._weights_sha256)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise SourceTimeout(
                f"{self.origin or 'the source'} did not come within {self._limits.total_s:g} s, which is all that an "
                "import gets (--import-timeout-s)",
                field="source",
            ) from error
        return ReceivedFiles(await asyncio.to_thread(config.read_bytes), weights)

    async def _locate(self) -> str:
        tries = 0
        while True:
            try:
                async with asyncio.timeout(self._limits.stall_s) as stall:
                    return await self._source.locate()
            except TimeoutError as error:
                if not stall.expired():
                    raise
                failure: Exception = _Stalled()
                failure.__cause__ = error
            except SourceUnreachable as error:
                failure = error
            tries += 1
            await self._pause(failure, tries, "the source")

    async def _file(self, name: str, limit_bytes: int, asked_sha256: str = "") -> Path:
        file = await asyncio.to_thread(IncomingFile, self._folder / name)
        fetch = _FileFetch(self, file, name, limit_bytes, asked_sha256)
        tries, most_bytes = 0, 0
        try:
            while True:
                try:
                    await fetch.attempt()
                except (_Stalled, SourceUnreachable) as error:
                    tries = 1 if file.size_bytes > most_bytes else tries + 1
                    most_bytes = max(most_bytes, file.size_bytes)
                    await self._pause(error, tries, fetch.what)
                else:
                    self._whole_bytes += file.size_bytes
                    return file.path
        finally:
            file.close()

    def open(self, name: str, offset: int, stamp: str) -> AbstractAsyncContextManager[Opened]:
        """Open a file of the source."""
        return self._source.open(name, offset, stamp)

    @property
    def stall_s(self) -> float:
        """How long nothing may come."""
        return self._limits.stall_s

    def require_space(self, size_bytes: int) -> None:
        """Raise NoSpace where a file of that size, the exact factors and the artifact packed from them do not fit."""
        self._artifacts.require_space(5 * size_bytes // 2)

    def came(self, received_bytes: int, size_bytes: int) -> None:
        """Tell how much of the file in work is here."""
        whole = self._whole_bytes
        self._on_progress(Progress(self.origin, whole + received_bytes, whole + max(size_bytes, received_bytes)))

    async def _pause(self, failure: Exception, tries: int, what: str) -> None:
        """Wait before the next try, or raise what makes it useless."""
        stalled = isinstance(failure, _Stalled)
        if tries >= MAX_TRIES:
            if not stalled:
                raise failure
            raise SourceTimeout(
                f"{what} stood still for {self.stall_s:g} s (--import-stall-s), {tries} times", field="source"
            ) from failure
        pause_s = PAUSE.jittered_s(tries, self._rng)
        log.info("registry.import_retry", what=what, stalled=stalled, error=str(failure), pause_s=round(pause_s, 2))
        await asyncio.sleep(pause_s)


class _FileFetch:
    """One file of a fetch, over as many attempts as it takes."""

    def __init__(self, fetch: Fetch, file: IncomingFile, name: str, limit_bytes: int, asked_sha256: str) -> None:
        self._fetch = fetch
        self._asked_sha256 = asked_sha256
        self._file = file
        self._name = name
        self._limit_bytes = limit_bytes
        self._stamp = ""
        self._has_mismatched = False
        self.what = f"{name} of {fetch.origin}"

    async def attempt(self) -> None:
        """Read on until the file is whole. What came stays where that breaks off."""
        waiting = bytearray()
        try:
            opened = await self._read(waiting)
        except (_Stalled, SourceUnreachable):
            await self._write(waiting, 0)
            raise
        file = self._file
        if opened.size_bytes is not None and file.size_bytes < opened.size_bytes:
            raise SourceUnreachable(
                f"{self.what} is truncated: {file.size_bytes} of {opened.size_bytes} bytes came", field="source"
            )
        if opened.sha256 is None or opened.sha256 == file.sha256:
            self._check_asked(file.sha256)
            return
        if self._has_mismatched:
            raise CorruptArtifact(
                f"{self.what} came with SHA-256 {file.sha256} twice, and the source says {opened.sha256}",
                file=self._name,
                field="source",
            )
        self._has_mismatched = True
        await asyncio.to_thread(file.restart)
        raise SourceUnreachable(f"{self.what} did not come as the source says", field="source")

    async def _read(self, waiting: bytearray) -> Opened:
        """Read to the end; `waiting` holds what is not written yet. Raises _Stalled."""
        file, stall_s, loop = self._file, self._fetch.stall_s, asyncio.get_running_loop()
        try:
            async with (
                asyncio.timeout(stall_s) as stall,
                self._fetch.open(self._name, file.size_bytes, self._stamp) as opened,
            ):
                await self._begin(opened)
                size_bytes = opened.size_bytes or 0
                async for chunk in opened.chunks:
                    waiting += chunk
                    self._check_size(file.size_bytes + len(waiting), opened.size_bytes)
                    if len(waiting) >= _WRITE_BYTES:
                        await self._write(waiting, size_bytes)
                    stall.reschedule(loop.time() + stall_s)
                stall.reschedule(None)
                await self._write(waiting, size_bytes)
                return opened
        except TimeoutError as error:
            if not stall.expired():
                raise
            raise _Stalled from error

    async def _begin(self, opened: Opened) -> None:
        """Decide whether what comes continues the file, and whether it may."""
        has_changed = self._file.size_bytes > 0 and opened.stamp != self._stamp
        self._stamp = opened.stamp
        if has_changed or opened.offset != self._file.size_bytes:
            await asyncio.to_thread(self._file.restart)
            if opened.offset:
                raise SourceUnreachable(f"{self.what} changed while it was read", field="source")
        if opened.sha256 is not None:
            self._check_asked(opened.sha256)  # before the first byte, where the source tells
        if opened.size_bytes is not None:
            self._check_size(opened.size_bytes, None)
            self._fetch.require_space(opened.size_bytes - self._file.size_bytes)

    def _check_asked(self, sha256: str) -> None:
        if self._asked_sha256 and sha256 != self._asked_sha256:
            raise CorruptArtifact(
                f"{self.what} has SHA-256 {sha256[:12]}..., and {self._asked_sha256[:12]}... was asked for",
                file=self._name,
                field="weights_sha256",
            )

    def _check_size(self, size_bytes: int, told_bytes: int | None) -> None:
        if told_bytes is not None and size_bytes > told_bytes:
            raise CorruptArtifact(
                f"{self.what} has more than the {told_bytes} bytes that the source tells",
                file=self._name,
                field="source",
            )
        if size_bytes > self._limit_bytes:
            raise TooLarge(
                f"{self.what} has at least {size_bytes} bytes; at most {self._limit_bytes} are accepted",
                field="source",
                limit=self._limit_bytes,
            )

    async def _write(self, waiting: bytearray, size_bytes: int) -> None:
        data = bytes(waiting)
        waiting.clear()
        if data:
            await to_the_end(asyncio.to_thread(self._file.append, data))
            self._fetch.came(self._file.size_bytes, size_bytes)
