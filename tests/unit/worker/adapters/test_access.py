"""Requests that an adapter's file does not reach in time: what they are told, and what becomes of the fetch."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from loraplex.errors import ArtifactUnreachable, DeadlineUnreachable
from tests.artifact_source import a_store, until
from worker.adapters.access import AdapterAccess
from worker.adapters.places import Places
from worker.adapters.versions import Versions
from worker.requests import CheckedAdapter


class Access:
    """With a background that takes what is late, if it shall."""

    def __init__(self, store, *, takes: bool) -> None:
        self.store = store
        self.takes = takes
        self.brought: list[str] = []
        self.access = AdapterAccess(store, Versions(), lambda _: None, self.bring)

    def bring(self, adapter: CheckedAdapter) -> bool:
        self.brought.append(adapter.artifact_digest)
        if self.takes:
            self.store.stay(adapter.artifact_digest)
        return self.takes

    async def acquire(self, digest: str, remaining_s: float | None = 0.01):
        return await self.access.acquire(CheckedAdapter("ab" * 32, digest), remaining_s)


@asynccontextmanager
async def an_access(tmp_path, source, *, takes: bool = True, **options):
    async with a_store(tmp_path, source, **options) as store:
        yield Access(store, takes=takes)


async def test_a_fetch_that_outlasts_a_request_goes_on_and_is_there_for_the_next(tmp_path, source):
    digest = source.add(b"x" * 100)
    source.gate.clear()
    source.gate_at = 50
    async with an_access(tmp_path, source, clock=lambda: 0.0) as access:
        for _ in range(2):
            with pytest.raises(DeadlineUnreachable, match="goes on coming") as refused:
                await access.acquire(digest)
            assert refused.value.retry_after_s
        assert access.brought == [digest] * 2
        source.gate.set()
        lease = await access.acquire(digest, 60)
        assert (source.opened[digest], source.offsets) == (1, [0])
        lease.release()


async def test_when_to_try_again_follows_from_the_bytes_that_came(tmp_path, source):
    digest = source.add(b"x" * 100)
    source.gate.clear()
    source.gate_at = 50
    now = [0.0]
    async with an_access(tmp_path, source, clock=lambda: now[0]) as access:
        first = asyncio.create_task(access.acquire(digest, 600))
        await until(lambda: source.open_now == 1 and access.store._fetches[digest].progress.num_bytes >= 56)
        now[0] = 20.0
        with pytest.raises(DeadlineUnreachable) as refused:
            await access.acquire(digest)
        assert 10 < (refused.value.retry_after_s or 0) < 30
        source.gate.set()
        (await first).release()


async def test_where_too_much_is_under_way_a_late_fetch_ends_and_nobody_says_that_it_comes(tmp_path, source):
    digest = source.add(b"x" * 100)
    source.gate.clear()
    async with an_access(tmp_path, source, takes=False, clock=lambda: 0.0) as access:
        with pytest.raises(DeadlineUnreachable, match="try again later") as refused:
            await access.acquire(digest)
        assert refused.value.retry_after_s == 1.0
        assert not access.store.is_fetching(digest)


async def test_one_that_waits_for_its_place_is_late_not_unreachable(tmp_path, source):
    first, second = source.add(b"f" * 100), source.add(b"s" * 100)
    source.gate.clear()
    now = [0.0]
    places = Places(1, patience_s=1e6)
    async with an_access(tmp_path, source, places=places, clock=lambda: now[0]) as access:
        waiting = asyncio.create_task(access.store.acquire(first))
        await until(lambda: source.open_now == 1)
        now[0] = 100.0
        with pytest.raises(DeadlineUnreachable):
            await access.acquire(second)
        assert access.store.is_fetching(second)
        source.gate.set()
        (await waiting).release()


async def test_a_source_that_gives_nothing_is_told_as_such_and_not_waited_for_in_the_background(tmp_path, source):
    digest = source.add(b"x" * 100)
    source.gate.clear()
    now = [0.0]
    async with an_access(tmp_path, source, clock=lambda: now[0]) as access:
        first = asyncio.create_task(access.store.acquire(digest))
        await until(lambda: source.open_now == 1)
        now[0] = 100.0
        with pytest.raises(ArtifactUnreachable) as refused:
            await access.acquire(digest)
        assert refused.value.retry_after_s == 1.0
        assert access.brought == []
        assert access.access.quarantine.find(digest, 0.0) is None
        first.cancel()


@pytest.fixture
def late(monkeypatch) -> list[str]:
    """Which adapters were late; who gives no deadline believes so after an instant."""
    seen: list[str] = []
    judge = AdapterAccess._late

    def note(access, adapter, progress, now, **options):
        seen.append(adapter.artifact_digest)
        return judge(access, adapter, progress, now, **options)

    monkeypatch.setattr("worker.adapters.access.UNHURRIED_S", 0.01)
    monkeypatch.setattr(AdapterAccess, "_late", note)
    return seen


async def test_what_comes_is_waited_for_by_who_gives_no_deadline(tmp_path, source, late):
    digest = source.add(b"x" * 100)
    source.gate.clear()
    source.gate_at = 50
    async with an_access(tmp_path, source, clock=lambda: 0.0) as access:
        waiting = asyncio.create_task(access.acquire(digest, None))
        await until(lambda: len(late) >= 2)
        source.gate.set()
        (await waiting).release()
        assert access.brought == []


async def test_who_gives_no_deadline_waits_for_its_turn_however_long(tmp_path, source, late):
    first, second = source.add(b"f" * 100), source.add(b"s" * 100)
    source.gate.clear()
    async with an_access(tmp_path, source, places=Places(1, patience_s=1e6), clock=lambda: 0.0) as access:
        holding = asyncio.create_task(access.store.acquire(first))
        await until(lambda: source.open_now == 1)
        waiting = asyncio.create_task(access.acquire(second, None))
        await until(lambda: late.count(second) >= 2)
        source.gate.set()
        for each in (await holding, await waiting):
            each.release()
        assert access.brought == []


async def test_who_gives_no_deadline_waits_for_no_source_that_gives_nothing(tmp_path, source, late):
    digest = source.add(b"x" * 100)
    source.gate.clear()
    now = [0.0]
    async with an_access(tmp_path, source, clock=lambda: now[0]) as access:
        waiting = asyncio.create_task(access.acquire(digest, None))
        await until(lambda: len(late) >= 2)
        now[0] = 100.0
        with pytest.raises(ArtifactUnreachable):
            await waiting
