"""The disk cache: one fetch per artifact, only verified bytes, and typed errors when something breaks."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.adapter_format.packed import HEAD, PackedAdapter, PackedMatrix, pack
from loraplex.errors import ArtifactNotFound, ArtifactUnreachable, CorruptArtifact, FailedPrecondition, NoSpace
from tests.artifact_source import QUICK, a_store, files, leftovers, until
from worker.adapters.cached_files import verify
from worker.adapters.download import RetryPolicy
from worker.adapters.places import Places
from worker.adapters.source import ArtifactStream
from worker.adapters.store import AdapterStore
from worker.mailbox import Urgency


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
        assert store._places.num_free == 1  # given back once


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
        store._retry = RetryPolicy()
        await store.acquire(digest)


async def test_waiting_for_room_is_no_stall(tmp_path, source, monkeypatch):
    used, new = source.add(b"u" * 600), source.add(b"n" * 600)
    store = AdapterStore(tmp_path / "artifacts", source, budget_bytes=1000, retry=RetryPolicy(stall_s=60))
    loop, clock = asyncio.get_running_loop(), time.monotonic
    async with store:
        lease = await store.acquire(used)
        waiting = asyncio.create_task(store.acquire(new))
        await until(lambda: source.open_now == 1)
        monkeypatch.setattr(loop, "time", lambda: clock() + 1000)
        await asyncio.sleep(0.05)  # whatever was to happen meanwhile happens now
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
        async with asyncio.timeout(60):
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
        assert not (await store.acquire(digest)).waited
        store.distrust(digest)
        lease = await store.acquire(digest)
        assert (lease.waited, source.opened[digest]) == (True, 1)


def _rewritten(path):
    facts = path.stat()
    while path.stat().st_ctime_ns == facts.st_ctime_ns:  # its clock may have ticks
        with path.open("r+b") as file:
            file.seek(50)
            file.write(b"y")
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))  # as if nothing had been


def _replaced(path):
    other = path.with_name("other")
    other.write_bytes(b"y" * 100)
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize("change", [_rewritten, _replaced, Path.unlink])
@pytest.mark.parametrize("in_use", [False, True])
async def test_a_file_that_is_changed_after_it_was_verified_is_fetched_anew_before_its_next_use(
    tmp_path, source, change, in_use
):
    digest = source.add(b"x" * 100)
    async with a_store(tmp_path, source) as store:
        lease = await store.acquire(digest)
        if not in_use:
            lease.release()
        change(tmp_path / "artifacts" / digest)
        lease.release()
        again = await store.acquire(digest)
        assert (tmp_path / "artifacts" / digest).read_bytes() == b"x" * 100
        assert (again.fetched, again.waited, source.opened[digest]) == (True, True, 2)
        again.release()
        assert not (await store.acquire(digest)).waited


async def test_a_file_that_only_its_times_changed_of_is_hashed_and_not_fetched(tmp_path, source):
    digest = source.add(b"x" * 100)
    async with a_store(tmp_path, source) as store:
        (await store.acquire(digest)).release()
        os.utime(tmp_path / "artifacts" / digest, ns=(1, 1))
        lease = await store.acquire(digest)
        assert (lease.fetched, lease.waited, source.opened[digest]) == (False, True, 1)


async def test_a_file_that_is_touched_all_the_time_is_hashed_once_for_each_use(tmp_path, source, monkeypatch):
    digest, hashed = source.add(b"x" * 100), []

    def touching(path, *facts):
        stamp = verify(path, *facts)
        hashed.append(stamp)
        os.utime(path, ns=(len(hashed), len(hashed)))
        return stamp

    monkeypatch.setattr("worker.adapters.store.verify", touching)
    async with a_store(tmp_path, source) as store:
        (await store.acquire(digest)).release()
        os.utime(tmp_path / "artifacts" / digest, ns=(0, 0))
        assert not store.is_usable(digest)
        for count in (1, 2):
            (await store.acquire(digest)).release()
            assert len(hashed) == count
        assert source.opened[digest] == 1


async def test_a_file_that_cannot_be_opened_for_want_of_files_is_kept(tmp_path, source, monkeypatch):
    digest = source.add(b"x" * 100)
    async with a_store(tmp_path, source) as store:
        (await store.acquire(digest)).release()
        os.utime(tmp_path / "artifacts" / digest, ns=(0, 0))
        with monkeypatch.context() as patch:

            def refuse(*_):
                raise OSError(errno.EMFILE, "too many open files")

            patch.setattr("worker.adapters.store.verify", refuse)
            with pytest.raises(ArtifactUnreachable, match="too many"):
                await store.acquire(digest)
            assert await store.recheck(digest)
        (await store.acquire(digest)).release()
        assert source.opened[digest] == 1


async def test_who_could_not_read_a_file_that_was_replaced_meanwhile_read_the_damaged_one(tmp_path, source):
    digest = source.add(b"x" * 100)
    async with a_store(tmp_path, source) as store:
        first = await store.acquire(digest)
        _rewritten(tmp_path / "artifacts" / digest)
        second = await store.acquire(digest)
        assert not await store.recheck(digest)
        assert await store.recheck(digest)
        assert store.is_usable(digest)
        first.release()
        second.release()


async def test_leftovers_are_thrown_away_at_the_start(tmp_path, source):
    async with a_store(tmp_path, source):
        pass
    (tmp_path / "artifacts" / ".incoming" / "half").write_bytes(b"x")
    (tmp_path / "artifacts" / "notes.txt").write_bytes(b"x")
    async with a_store(tmp_path, source) as store:
        assert leftovers(tmp_path) == []
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


async def test_one_folder_has_one_owner(tmp_path, source):
    async with a_store(tmp_path, source):
        with pytest.raises(FailedPrecondition, match="cache folder of its own"):
            async with a_store(tmp_path, source):
                pass
    async with a_store(tmp_path, source):
        pass


async def test_requests_are_fetched_before_prefetches_and_so_is_a_prefetch_that_one_joins(tmp_path, source):
    running, *ahead = (source.add(bytes([n]) * 50) for n in range(4))
    asked = source.add(b"asked")
    source.gate.clear()
    async with a_store(tmp_path, source, places=Places(1, patience_s=1e6)) as store:
        waiting = [asyncio.create_task(store.acquire(running))]
        await until(lambda: source.open_now == 1)
        waiting += [asyncio.create_task(store.acquire(digest, Urgency.AHEAD)) for digest in ahead]
        await until(lambda: all(store.is_fetching(digest) for digest in ahead))
        waiting += [asyncio.create_task(store.acquire(digest)) for digest in (asked, ahead[2])]
        await until(lambda: store.num_references == 6)
        for _ in range(20):
            await asyncio.sleep(0)
        source.gate.set()
        await asyncio.gather(*waiting)
    assert list(source.opened) == [running, ahead[2], asked, ahead[0], ahead[1]]


async def test_a_fetch_that_somebody_stays_for_goes_on_whoever_leaves_it(tmp_path, source):
    digest = source.add(b"x" * 100)
    source.gate.clear()
    async with a_store(tmp_path, source) as store:
        store.stay(digest)()  # nothing is under way
        for stays in (True, False):
            waiting = asyncio.create_task(store.acquire(digest))
            await until(lambda: source.open_now == 1)
            leave = store.stay(digest)
            waiting.cancel()
            await asyncio.wait([waiting])
            assert store.is_fetching(digest)
            if stays:
                leave()
                assert not store.is_fetching(digest)
                await until(lambda: source.open_now == 0)
        source.gate.set()
        (await store.acquire(digest)).release()
        leave()
        assert source.opened[digest] == 2


async def test_whoever_is_late_hears_how_far_it_is_and_may_wait_on_or_raise(tmp_path, source):
    digest = source.add(b"x" * 100)
    source.gate.clear()
    source.gate_at = 50
    seen: list[tuple[int, Any, bool]] = []
    now = [0.0]
    async with a_store(tmp_path, source, clock=lambda: now[0]) as store:
        first = asyncio.create_task(store.acquire(digest))
        await until(lambda: source.open_now == 1 and store._fetches[digest].progress.num_bytes >= 56)
        now[0] = 5.0

        def late(progress, told_now):
            seen.append((progress.num_bytes, progress.left_s(told_now), store.is_fetching(digest)))
            return None if len(seen) == 1 else NoSpace("had enough")

        with pytest.raises(NoSpace, match="had enough"):
            await store.acquire(digest, within_s=0.01, on_late=late)
        num_bytes = seen[0][0]
        assert seen == [(num_bytes, pytest.approx((100 - num_bytes) * 5 / num_bytes), True)] * 2
        assert store.left_s(digest) == seen[0][1]
        source.gate.set()
        await first
        assert store.left_s(digest) is None
