"""The disk cache's room: a budget, who leaves for whom, and what happens when the disk itself is full."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import threading

import pytest

from loraplex.errors import ArtifactUnreachable, FailedPrecondition, NoSpace
from tests.artifact_source import a_store, files, leftovers, until, use
from worker.adapters import download as download_module
from worker.adapters import store as store_module
from worker.adapters.download import Partial
from worker.adapters.outside import outside_of
from worker.adapters.places import Places
from worker.mailbox import Urgency


async def test_the_least_recently_used_idle_file_makes_room(tmp_path, source):
    a, b, c = (source.add(bytes([n]) * 400) for n in range(3))
    async with a_store(tmp_path, source) as store:
        for digest in (a, b, a, c):
            await use(store, digest)
        assert files(tmp_path) == {a, c}
        assert store.cached_bytes == 800


async def test_a_file_that_many_have_used_outlasts_newer_ones_but_not_for_ever(tmp_path, source):
    often, *others = (source.add(bytes([n]) * 400) for n in range(12))
    async with a_store(tmp_path, source) as store:
        for _ in range(4):
            await use(store, often)
        stayed = 0
        for digest in others:
            await use(store, digest)
            stayed += often in files(tmp_path)
        assert 2 < stayed < len(others)


async def test_of_files_used_alike_the_one_that_is_slow_to_fetch_again_stays(tmp_path, source):
    slow, quick, new = (source.add(bytes([n]) * 400) for n in range(3))
    async with a_store(tmp_path, source) as store:
        for digest, seconds in ((slow, 2.0), (quick, 0.1)):
            await use(store, digest, fetch_s=seconds)
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
        with pytest.raises(NoSpace, match="beside those pinned") as refused:
            await waiting
        assert refused.value.retry_after_s == 1.0
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
        async with asyncio.timeout(60):
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

        async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
            for _ in range(6):
                tasks.create_task(user())
        assert set(store._files) == files(tmp_path)
        assert not store.num_references
        assert not store._fetches
    assert leftovers(tmp_path) == []


async def test_one_that_waits_for_room_neither_holds_up_one_that_fits_nor_keeps_its_place(tmp_path, source):
    used, large, small = source.add(b"u" * 600), source.add(b"l" * 900), source.add(b"s" * 100)
    async with a_store(tmp_path, source, places=Places(1, patience_s=1e6)) as store:
        lease = await store.acquire(used)
        waiting = asyncio.create_task(store.acquire(large))
        await until(lambda: source.open_now == 1)
        async with asyncio.timeout(60):
            (await store.acquire(small)).release()
        assert files(tmp_path) == {used, small}
        lease.release()
        (await waiting).release()
        assert large in files(tmp_path)
        assert used not in files(tmp_path)


async def test_a_prefetch_that_waits_for_room_lets_a_request_have_it_first(tmp_path, source):
    used, ahead, wanted = source.add(b"u" * 900), source.add(b"a" * 800), source.add(b"w" * 700)
    async with a_store(tmp_path, source) as store:
        lease = await store.acquire(used)
        prefetch = asyncio.create_task(store.acquire(ahead, Urgency.AHEAD))
        await until(lambda: source.open_now == 1)
        request = asyncio.create_task(store.acquire(wanted))
        await until(lambda: source.open_now == 2)
        lease.release()
        async with asyncio.timeout(60):
            lease = await request
        assert not prefetch.done()
        joined = asyncio.create_task(store.acquire(ahead))
        lease.release()
        for each in (await joined, await prefetch):
            each.release()


async def test_who_leaves_when_all_has_come_leaves_nothing_on_the_disk(tmp_path, source, monkeypatch):
    digest = source.add(b"x" * 100)
    reading, go_on = threading.Event(), threading.Event()

    def slowly(path):
        reading.set()
        assert go_on.wait(30)
        return outside_of(path)

    monkeypatch.setattr(store_module, "outside_of", slowly)
    async with a_store(tmp_path, source) as store:
        waiting = asyncio.create_task(store.acquire(digest))
        assert await asyncio.to_thread(reading.wait, 30)
        fetch = store._fetches[digest].task
        assert fetch is not None
        waiting.cancel()
        await asyncio.wait([waiting, fetch])
        go_on.set()
        assert (leftovers(tmp_path), files(tmp_path), store.cached_bytes) == ([], set(), 0)


async def test_a_file_that_cannot_get_its_name_leaves_nothing_on_the_disk(tmp_path, source):
    digest = source.add(b"x" * 100)
    async with a_store(tmp_path, source) as store:
        (tmp_path / "artifacts" / digest).mkdir()
        with pytest.raises(ArtifactUnreachable, match="cannot be written"):
            await store.acquire(digest)
        assert leftovers(tmp_path) == []


async def test_a_damaged_file_that_is_dropped_while_it_is_in_use_leaves_its_room_at_once(tmp_path, source):
    damaged, other = source.add(b"d" * 600), source.add(b"o" * 500)
    async with a_store(tmp_path, source) as store:
        lease = await store.acquire(damaged)
        waiting = asyncio.create_task(store.acquire(other))
        await until(lambda: source.open_now == 1)
        (tmp_path / "artifacts" / damaged).write_bytes(b"x")
        assert not await store.recheck(damaged)
        async with asyncio.timeout(60):
            (await waiting).release()
        lease.release()
