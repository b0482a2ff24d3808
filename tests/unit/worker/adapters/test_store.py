"""The disk cache: one fetch per artifact, only verified bytes, a budget, and typed errors when something breaks."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from common.adapter_format.packed import HEAD, PackedAdapter, PackedMatrix, pack
from common.backoff import Backoff
from loraplex.errors import ArtifactNotFound, ArtifactUnreachable, CorruptArtifact, FailedPrecondition, NoSpace
from worker.adapters import download as download_module
from worker.adapters.download import Partial, RetryPolicy
from worker.adapters.places import Places
from worker.adapters.source import ArtifactStream, SourceInterrupted
from worker.adapters.store import AdapterStore

QUICK = RetryPolicy(tries=3, backoff=Backoff(first_s=0.001, longest_s=0.002))


class FakeSource:
    """Artifacts in memory; `gate` holds the bytes back, `breaks` lists after how many bytes reads end."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.opened: Counter[str] = Counter()
        self.offsets: list[int] = []
        self.gate = asyncio.Event()
        self.gate.set()
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
            await self.gate.wait()
            for at in range(offset, min(end, len(blob)), 7):
                yield blob[at : min(at + 7, end)]
            if end < len(blob):
                raise SourceInterrupted("told to break")

        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        try:
            yield ArtifactStream(len(blob), chunks())
        finally:
            self.open_now -= 1


@pytest.fixture
async def source() -> FakeSource:
    return FakeSource()


def a_store(tmp_path, source, budget_bytes=1000, **options) -> AdapterStore:
    return AdapterStore(tmp_path / "artifacts", source, budget_bytes=budget_bytes, retry=QUICK, **options)


def files(tmp_path) -> set[str]:
    return {path.name for path in (tmp_path / "artifacts").iterdir() if path.is_file() and path.name != ".lock"}


def leftovers(tmp_path) -> list[str]:
    return [path.name for path in (tmp_path / "artifacts" / ".incoming").iterdir()]


async def until(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - conditions of several objects, which have no event
            await asyncio.sleep(0)


async def test_a_lease_tells_what_of_its_file_does_not_go_into_the_arena(tmp_path, source):
    matrix = PackedMatrix(HEAD, "F16", np.ones((32, 16), np.float16))
    pack(PackedAdapter("0" * 64, "1" * 64, "none", (), (matrix,)), tmp_path / "packed")
    digests = [source.add((tmp_path / "packed").read_bytes()), source.add(b"x" * 100)]
    for _ in range(2):  # fetched, and found by the next process
        async with a_store(tmp_path, source, budget_bytes=10_000) as store:
            files = [(await store.acquire(digest)).file for digest in digests]
        assert [(file.outside_bytes, file.vocabulary_bytes) for file in files] == [(1024, 2048), (0, 0)]
        assert files[0].arena_bytes == len(source.blobs[digests[0]]) - 1024
    assert source.opened[digests[0]] == 1


async def test_however_many_ask_an_artifact_is_fetched_once(tmp_path, source):
    digest = source.add(b"x" * 100)
    async with a_store(tmp_path, source) as store:
        leases = await asyncio.gather(*(store.acquire(digest) for _ in range(20)))
        assert source.opened[digest] == 1
        assert {lease.file.path for lease in leases} == {str(tmp_path / "artifacts" / digest)}
        assert all(lease.fetched for lease in leases)
        assert (tmp_path / "artifacts" / digest).read_bytes() == b"x" * 100
        again = await store.acquire(digest)
        assert (again.fetched, again.file.artifact_bytes, source.opened[digest]) == (False, 100, 1)
    assert leftovers(tmp_path) == []


async def test_fetches_run_side_by_side_so_a_slow_one_blocks_no_other(tmp_path, source):
    digests = [source.add(bytes([n]) * 50) for n in range(4)]
    source.gate.clear()
    async with a_store(tmp_path, source) as store, asyncio.TaskGroup() as tasks:
        for digest in digests:
            tasks.create_task(store.acquire(digest))
        await until(lambda: source.most_open == 4)
        source.gate.set()


async def test_only_so_many_fetches_get_on_at_a_time_first_come_first_served(tmp_path, source):
    digests = [source.add(bytes([n]) * 50) for n in range(4)]
    source.gate.clear()
    async with a_store(tmp_path, source, places=Places(2, patience_s=30)) as store, asyncio.TaskGroup() as tasks:
        for digest in digests:
            tasks.create_task(store.acquire(digest))
        await until(lambda: source.most_open == 2)
        for _ in range(20):
            await asyncio.sleep(0)
        assert list(source.opened) == digests[:2]
        source.gate.set()
    assert list(source.opened) == digests
    assert source.most_open == 2


async def test_a_download_that_stands_still_gives_its_place_to_the_next_and_goes_on_later(tmp_path, source):
    stalled, other = source.add(b"s" * 50), source.add(b"o" * 50)
    source.gate.clear()
    async with a_store(tmp_path, source, places=Places(1, patience_s=0.01)) as store:
        first = asyncio.create_task(store.acquire(stalled))
        await until(lambda: source.open_now == 1)
        second = asyncio.create_task(store.acquire(other))
        await until(lambda: source.open_now == 2)
        source.gate.set()
        assert {(await first).fetched, (await second).fetched} == {True}
        assert store._places._free._value == 1  # given back once


async def test_a_download_without_a_byte_for_too_long_is_given_up_and_told(tmp_path, source):
    digest = source.add(b"x" * 50)
    source.gate.clear()
    store = AdapterStore(tmp_path / "artifacts", source, budget_bytes=1000, retry=RetryPolicy(stall_s=0.02))
    async with store:
        with pytest.raises(ArtifactUnreachable, match=r"sent nothing for 0\.02 s"):
            await store.acquire(digest)
        assert leftovers(tmp_path) == []
        assert source.open_now == 0
        source.gate.set()
        await store.acquire(digest)


async def test_waiting_for_room_is_no_stall(tmp_path, source):
    used, new = source.add(b"u" * 600), source.add(b"n" * 600)
    store = AdapterStore(tmp_path / "artifacts", source, budget_bytes=1000, retry=RetryPolicy(stall_s=0.02))
    async with store:
        lease = await store.acquire(used)
        waiting = asyncio.create_task(store.acquire(new))
        await until(lambda: source.open_now == 1)
        await asyncio.sleep(0.05)
        lease.release()
        assert (await waiting).fetched


async def test_a_waiter_that_leaves_does_not_disturb_the_others(tmp_path, source):
    digest = source.add(b"x" * 100)
    source.gate.clear()
    async with a_store(tmp_path, source) as store:
        leaving, staying = (asyncio.create_task(store.acquire(digest)) for _ in range(2))
        await until(lambda: source.open_now == 1)
        leaving.cancel()
        await until(leaving.done)
        source.gate.set()
        assert (await staying).file.artifact_digest == digest
        assert source.opened[digest] == 1


async def test_a_fetch_nobody_waits_for_is_cancelled_and_leaves_nothing(tmp_path, source):
    digest = source.add(b"x" * 100)
    source.gate.clear()
    async with a_store(tmp_path, source) as store:
        waiters = [asyncio.create_task(store.acquire(digest)) for _ in range(3)]
        await until(lambda: source.open_now == 1)
        for waiter in waiters:
            waiter.cancel()
        await until(lambda: source.open_now == 0 and not leftovers(tmp_path))
        assert not store.is_fetching(digest)
        source.gate.set()
        await store.acquire(digest)
        assert source.opened[digest] == 2


async def test_who_asks_just_after_the_last_waiter_left_gets_a_fetch_of_its_own(tmp_path, source):
    digest = source.add(b"x" * 100)
    source.gate.clear()
    async with a_store(tmp_path, source) as store:
        first = asyncio.create_task(store.acquire(digest))
        await until(lambda: source.open_now == 1)
        first.cancel()
        second = asyncio.create_task(store.acquire(digest))
        await until(first.done)
        source.gate.set()
        async with asyncio.timeout(5):
            assert (await second).file.artifact_digest == digest


async def test_a_broken_download_goes_on_where_it_broke(tmp_path, source):
    digest = source.add(bytes(range(100)))
    source.breaks = [21, 42]
    async with a_store(tmp_path, source) as store:
        await store.acquire(digest)
        assert source.offsets == [0, 21, 63]


async def test_progress_resets_the_count_of_tries(tmp_path, source):
    digest = source.add(bytes(range(100)))
    source.breaks = [7] * 12
    async with a_store(tmp_path, source) as store:
        await store.acquire(digest)


async def test_tries_without_progress_end_with_unreachable(tmp_path, source):
    digest = source.add(bytes(range(100)))
    source.breaks = [0] * 100
    async with a_store(tmp_path, source) as store:
        with pytest.raises(ArtifactUnreachable, match="not cached here"):
            await store.acquire(digest)
        assert source.opened[digest] == QUICK.tries
    assert leftovers(tmp_path) == []


async def test_an_unknown_artifact_is_not_found_at_once(tmp_path, source):
    async with a_store(tmp_path, source) as store:
        with pytest.raises(ArtifactNotFound):
            await store.acquire("0" * 64)
        assert source.opened["0" * 64] == 1


async def test_wrong_bytes_are_refused_thrown_away_and_fetched_anew_next_time(tmp_path, source):
    digest = hashlib.sha256(b"right").hexdigest()
    source.add(b"wrong", digest=digest)
    async with a_store(tmp_path, source) as store:
        with pytest.raises(CorruptArtifact):
            await store.acquire(digest)
        assert files(tmp_path) == set()
        assert leftovers(tmp_path) == []
        source.add(b"right", digest=digest)
        await store.acquire(digest)


async def test_more_bytes_than_announced_are_refused(tmp_path, source):
    digest = source.add(b"x" * 100)
    real_open = source.open

    @asynccontextmanager
    async def lying(artifact_digest, offset):
        async with real_open(artifact_digest, offset) as stream:
            yield ArtifactStream(50, stream.chunks)

    source.open = lying
    async with a_store(tmp_path, source) as store:
        with pytest.raises(CorruptArtifact, match="announced"):
            await store.acquire(digest)


@pytest.mark.parametrize("damage", [b"y" * 100, b"x" * 99, b""])
async def test_a_file_from_before_is_verified_before_its_first_use_and_fetched_anew_if_damaged(
    tmp_path, source, damage
):
    digest = source.add(b"x" * 100)
    async with a_store(tmp_path, source) as store:
        (await store.acquire(digest)).release()
    (tmp_path / "artifacts" / digest).write_bytes(damage)
    async with a_store(tmp_path, source) as store:
        assert store.holds(digest)
        await store.acquire(digest)
        assert (tmp_path / "artifacts" / digest).read_bytes() == b"x" * 100
        assert source.opened[digest] == 2


async def test_an_intact_file_from_before_needs_no_source(tmp_path, source):
    digest = source.add(b"x" * 100)
    async with a_store(tmp_path, source) as store:
        (await store.acquire(digest)).release()
    source.blobs.clear()
    async with a_store(tmp_path, source) as store:
        lease = await store.acquire(digest)
        assert (lease.fetched, source.opened[digest]) == (False, 1)


async def test_a_distrusted_file_is_hashed_again(tmp_path, source):
    digest = source.add(b"x" * 100)
    async with a_store(tmp_path, source) as store:
        (await store.acquire(digest)).release()
        (tmp_path / "artifacts" / digest).write_bytes(b"y" * 100)
        store.distrust(digest)
        await store.acquire(digest)
        assert (tmp_path / "artifacts" / digest).read_bytes() == b"x" * 100


async def test_leftovers_are_thrown_away_at_the_start(tmp_path, source):
    async with a_store(tmp_path, source):
        pass
    (tmp_path / "artifacts" / ".incoming" / "half").write_bytes(b"x")
    (tmp_path / "artifacts" / "notes.txt").write_bytes(b"x")
    async with a_store(tmp_path, source) as store:
        assert leftovers(tmp_path) == []
        assert store.cached_bytes == 0


async def test_the_least_recently_used_idle_file_makes_room(tmp_path, source):
    a, b, c = (source.add(bytes([n]) * 400) for n in range(3))
    async with a_store(tmp_path, source) as store:
        for digest in (a, b, a):
            (await store.acquire(digest)).release()
        (await store.acquire(c)).release()
        assert files(tmp_path) == {a, c}
        assert store.cached_bytes == 800


async def test_a_file_that_many_have_used_outlasts_newer_ones_but_not_for_ever(tmp_path, source):
    often, *others = (source.add(bytes([n]) * 400) for n in range(12))
    async with a_store(tmp_path, source) as store:
        for _ in range(4):
            (await store.acquire(often)).release()
        for entry in store._cached.values():
            entry.fetch_s = 1.0
        stayed = 0
        for digest in others:
            (await store.acquire(digest)).release()
            store._cached[digest].fetch_s = 1.0
            stayed += often in files(tmp_path)
        assert 2 < stayed < len(others)


async def test_of_files_used_alike_the_one_that_is_slow_to_fetch_again_stays(tmp_path, source):
    slow, quick, new = (source.add(bytes([n]) * 400) for n in range(3))
    async with a_store(tmp_path, source) as store:
        for digest, seconds in ((slow, 2.0), (quick, 0.1)):
            lease = await store.acquire(digest)
            store._cached[digest].fetch_s = seconds
            lease.release()
        (await store.acquire(new)).release()
        assert files(tmp_path) == {slow, new}


async def test_a_new_process_evicts_first_what_the_last_one_used_longest_ago(tmp_path, source):
    a, b, c = (source.add(bytes([n]) * 400) for n in range(3))
    async with a_store(tmp_path, source) as store:
        for digest in (a, b):
            (await store.acquire(digest)).release()
    for digest, used_s in ((a, 2_000), (b, 1_000)):
        os.utime(tmp_path / "artifacts" / digest, (used_s, used_s))
    async with a_store(tmp_path, source) as store:
        (await store.acquire(c)).release()
        assert files(tmp_path) == {a, c}
        (await store.acquire(a)).release()
        assert (tmp_path / "artifacts" / a).stat().st_mtime > 2_000


async def test_who_does_not_fit_beside_what_is_kept_is_refused_and_holds_up_nobody(tmp_path, source):
    kept, large, small = source.add(b"k" * 600), source.add(b"l" * 500), source.add(b"s" * 300)
    async with a_store(tmp_path, source) as store:
        lease = await store.acquire(kept)
        waiting = asyncio.create_task(store.acquire(large))
        await until(lambda: source.open_now == 1)
        store.keep(kept, kept=True)
        with pytest.raises(NoSpace, match="beside those pinned"):
            await waiting
        (await store.acquire(small)).release()
        assert files(tmp_path) == {kept, small}
        store.keep(kept, kept=False)
        lease.release()
        (await store.acquire(large)).release()
        assert large in files(tmp_path)


async def test_a_file_is_removed_unless_somebody_uses_it(tmp_path, source):
    digest = source.add(b"x" * 100)
    async with a_store(tmp_path, source) as store:
        store.remove(digest)
        lease = await store.acquire(digest)
        with pytest.raises(FailedPrecondition, match="in use"):
            store.remove(digest)
        lease.release()
        store.remove(digest)
        assert files(tmp_path) == set()
        assert store.cached_bytes == 0


@pytest.mark.parametrize(("content", "intact"), [(b"x" * 100, True), (b"y" * 100, False), (b"", False)])
async def test_a_file_that_someone_found_unreadable_is_hashed_and_goes_if_it_is_damaged(
    tmp_path, source, content, intact
):
    digest = source.add(b"x" * 100)
    async with a_store(tmp_path, source) as store:
        lease = await store.acquire(digest)
        (tmp_path / "artifacts" / digest).write_bytes(content)
        assert await store.recheck(digest) is intact
        assert store.holds(digest) is intact
        lease.release()
        assert not await store.recheck("0" * 64)


async def test_how_each_fetch_ended_is_told(tmp_path, source):
    told: list[tuple[str, str]] = []
    digest = source.add(b"x" * 100)
    async with a_store(
        tmp_path, source, on_fetched=lambda digest, error: told.append((digest, getattr(error, "reason", "")))
    ) as store:
        await asyncio.gather(*(store.acquire(digest) for _ in range(3)))
        with pytest.raises(ArtifactNotFound):
            await store.acquire("0" * 64)
    assert told == [(digest, ""), ("0" * 64, "ARTIFACT_NOT_FOUND")]


async def test_files_on_the_device_are_evicted_last(tmp_path, source):
    a, b, c = (source.add(bytes([n]) * 400) for n in range(3))
    async with a_store(tmp_path, source, is_on_device=lambda digest: digest == a) as store:
        for digest in (a, b, c):
            (await store.acquire(digest)).release()
        assert files(tmp_path) == {a, c}


async def test_files_in_use_stay_and_the_newcomer_waits_for_room(tmp_path, source):
    a, b, c = (source.add(bytes([n]) * 400) for n in range(3))
    async with a_store(tmp_path, source) as store:
        leases = [await store.acquire(a), await store.acquire(b)]
        waiting = asyncio.create_task(store.acquire(c))
        await until(lambda: source.open_now == 1)
        assert files(tmp_path) == {a, b}
        leases[1].release()
        async with asyncio.timeout(5):
            await waiting
        assert files(tmp_path) == {a, c}


async def test_a_lease_released_twice_counts_once(tmp_path, source):
    a, b, c = (source.add(bytes([n]) * 400) for n in range(3))
    async with a_store(tmp_path, source) as store:
        first, second = await store.acquire(a), await store.acquire(a)
        first.release()
        first.release()
        (await store.acquire(b)).release()
        (await store.acquire(c)).release()
        assert a in files(tmp_path)
        second.release()


async def test_an_adapter_larger_than_the_whole_cache_is_refused_at_once(tmp_path, source):
    digest = source.add(b"x" * 1001)
    async with a_store(tmp_path, source) as store:
        with pytest.raises(NoSpace, match=r"1001 bytes.*1000") as caught:
            await store.acquire(digest)
        assert caught.value.metadata == {"limit": "1000", "length": "1001"}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
async def test_a_full_disk_is_told_and_leaves_nothing(tmp_path, source, monkeypatch, code):
    class FullDisk(Partial):
        def append(self, chunk: bytes) -> None:
            if self.size_bytes >= 50:
                raise OSError(code, "No space left on device")
            super().append(chunk)

    digest, now = source.add(b"x" * 100), [100.0]
    async with a_store(tmp_path, source, clock=lambda: now[0]) as store:
        monkeypatch.setattr(download_module, "Partial", FullDisk)
        with pytest.raises(NoSpace, match="is full") as caught:
            await store.acquire(digest)
        assert leftovers(tmp_path) == []
        monkeypatch.undo()
        with pytest.raises(NoSpace, match="is full"):  # not every request tries
            await store.acquire(digest)
        now[0] += caught.value.retry_after_s or 0.0
        await store.acquire(digest)


async def test_on_a_full_disk_what_is_on_the_device_stays(tmp_path, source, monkeypatch):
    first, second, third = (source.add(bytes([n]) * 100) for n in range(3))
    async with a_store(tmp_path, source, is_on_device={first, second}.__contains__) as store:
        for digest in (first, second):
            (await store.acquire(digest)).release()

        class FullDisk(Partial):
            def append(self, chunk: bytes) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(download_module, "Partial", FullDisk)
        with pytest.raises(NoSpace, match="is full"):
            await store.acquire(third)
        assert files(tmp_path) == {first, second}


async def test_on_a_full_disk_idle_adapters_make_room_and_used_ones_stay(tmp_path, source, monkeypatch):
    class SmallDisk(Partial):
        def append(self, chunk: bytes) -> None:
            stored = sum(file.stat().st_size for file in (tmp_path / "artifacts").rglob("*") if file.is_file())
            if stored + self.size_bytes + len(chunk) > 250:  # what is on its way is still in a buffer
                raise OSError(errno.ENOSPC, "No space left on device")
            super().append(chunk)

    monkeypatch.setattr(download_module, "Partial", SmallDisk)
    first, second, third, fourth = (source.add(bytes([n]) * 100) for n in range(4))
    async with a_store(tmp_path, source) as store:
        used = await store.acquire(first)
        (await store.acquire(second)).release()
        held = await store.acquire(third)
        assert files(tmp_path) == {first, third}
        with pytest.raises(NoSpace, match="is full"):
            await store.acquire(fourth)
        assert leftovers(tmp_path) == []
        held.release()
        (await store.acquire(fourth)).release()
        used.release()


async def test_one_folder_has_one_owner(tmp_path, source):
    async with a_store(tmp_path, source):
        with pytest.raises(FailedPrecondition, match="cache folder of its own"):
            async with a_store(tmp_path, source):
                pass
    async with a_store(tmp_path, source):
        pass


async def test_churn_keeps_to_the_budget_and_never_serves_wrong_bytes(tmp_path, source):
    chance = random.Random(7)
    blobs = {source.add(bytes([n]) * (50 + 20 * n)): bytes([n]) * (50 + 20 * n) for n in range(10)}
    async with a_store(tmp_path, source, budget_bytes=600) as store:

        async def user() -> None:
            for _ in range(15):
                digest = chance.choice(list(blobs))
                source.breaks = [chance.randrange(1, 60)] if chance.random() < 0.3 else []
                waiting = asyncio.create_task(store.acquire(digest))
                if chance.random() < 0.3:
                    await asyncio.sleep(chance.random() * 0.002)
                    waiting.cancel()
                try:
                    lease = await waiting
                except (asyncio.CancelledError, ArtifactUnreachable):
                    continue
                on_disk = await asyncio.to_thread((tmp_path / "artifacts" / digest).read_bytes)
                assert on_disk == blobs[digest]
                assert store.cached_bytes <= 600
                lease.release()

        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            for _ in range(6):
                tasks.create_task(user())
        assert set(store._cached) == files(tmp_path)
        assert not store._users
        assert not store._fetches
    assert leftovers(tmp_path) == []
