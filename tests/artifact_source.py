"""Artifacts for a worker's disk cache in tests: a source in memory, and stores that read from it."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from common.backoff import Backoff
from loraplex.errors import ArtifactNotFound
from worker.adapters.download import RetryPolicy
from worker.adapters.source import ArtifactStream, SourceInterrupted
from worker.adapters.store import AdapterStore

QUICK = RetryPolicy(tries=3, backoff=Backoff(first_s=0.001, longest_s=0.002))


class FakeSource:
    """Artifacts in memory.

    `gate` holds the bytes back from `gate_at` on; `breaks` lists after how many bytes reads end.
    """

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.opened: Counter[str] = Counter()
        self.offsets: list[int] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.gate_at = 0
        self.breaks: list[int] = []
        self.open_now = 0
        self.most_open = 0

    def add(self, blob: bytes, *, digest: str | None = None) -> str:
        name = digest or hashlib.sha256(blob).hexdigest()
        self.blobs[name] = blob
        return name

    @asynccontextmanager
    async def open(self, artifact_digest: str, offset: int) -> AsyncIterator[ArtifactStream]:
        self.opened[artifact_digest] += 1
        self.offsets.append(offset)
        if artifact_digest not in self.blobs:
            raise ArtifactNotFound("no such artifact")
        blob = self.blobs[artifact_digest]
        end = offset + self.breaks.pop(0) if self.breaks else len(blob)

        async def chunks() -> AsyncIterator[bytes]:
            for at in range(offset, min(end, len(blob)), 7):
                if at >= self.gate_at:
                    await self.gate.wait()
                yield blob[at : min(at + 7, end)]
            if end < len(blob):
                raise SourceInterrupted("told to break")

        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        try:
            yield ArtifactStream(len(blob), chunks())
        finally:
            self.open_now -= 1


def a_store(tmp_path, source, budget_bytes=1000, **options) -> AdapterStore:
    return AdapterStore(tmp_path / "artifacts", source, budget_bytes=budget_bytes, retry=QUICK, **options)


def files(tmp_path) -> set[str]:
    return {path.name for path in (tmp_path / "artifacts").iterdir() if path.is_file() and path.name != ".lock"}


def leftovers(tmp_path) -> list[str]:
    return [path.name for path in (tmp_path / "artifacts" / ".incoming").iterdir()]


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - conditions of several objects, which have no event
            await asyncio.sleep(0)


async def use(store: AdapterStore, artifact_digest: str, *, fetch_s: float = 1.0) -> None:
    """Use a file whose fetch is believed to have taken so long, whatever it took here."""
    lease = await store.acquire(artifact_digest)
    file = store._files.find(artifact_digest)
    assert file is not None
    file.fetch_s = fetch_s
    lease.release()
