"""LoadAdapter, PrefetchAdapter, UnloadAdapter and PinAdapter on a front end with a real engine process."""

from __future__ import annotations

import asyncio
import gc
import os
import signal

import grpc
import psutil
import pytest

from loraplex.errors import (
    ArtifactNotFound,
    BaseMismatch,
    CorruptArtifact,
    DeadlineUnreachable,
    DeviceFull,
    EngineDown,
    FailedPrecondition,
    InvalidRequest,
    LoraplexError,
    ResourceExhausted,
    from_rpc_error,
)
from loraplex.worker.v1.worker_pb2 import (
    LoadAdapterRequest,
    PinAdapterRequest,
    PrefetchAdapterRequest,
    ResolvedAdapter,
)
from tests.worker_front import TOLD_AFTER_1_S, running_front, serving_artifacts, told_long_before
from tests.worker_steering import DEVICE, DISK, NOWHERE, SOURCE, Steer, is_at, resolved
from worker.requests import CheckedAdapter

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_loaded_adapter_is_on_the_device_when_that_is_answered(front, steer, artifacts):
    digest = artifacts.add(b"loaded ahead")
    first, again = await steer.load(digest), await steer.load(digest)
    assert (first.tier_hit, again.tier_hit) == (SOURCE, DEVICE)
    assert first.load_time.ToNanoseconds() > 0
    answer = await front.generate(front.request(artifact=digest, max_tokens=2))
    assert answer.finished.facts.tier_hit == DEVICE
    assert artifacts.opened[digest] == 1


async def test_loads_of_one_adapter_at_once_are_one_load(front, steer, artifacts):
    digest = artifacts.add(b"slow, and wanted by many")
    artifacts.gate = asyncio.Event()  # none is done before the last has come
    loads = [asyncio.create_task(steer.load(digest)) for _ in range(5)]
    async with asyncio.timeout(30):
        while front.app._store.num_references < 5:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
    artifacts.gate.set()
    answers = await asyncio.gather(*loads)
    assert {answer.tier_hit for answer in answers} <= {SOURCE, DISK}
    assert artifacts.opened[digest] == 1
    assert front.app._engine.num_requests == 0


async def test_a_load_says_why_it_failed(steer, artifacts):
    with pytest.raises(ArtifactNotFound):
        await steer.load("12" * 32)
    with pytest.raises(CorruptArtifact):
        await steer.load(artifacts.add(b"corrupt"))


async def test_a_prefetch_is_answered_at_once_and_comes_as_far_as_asked(front, steer, artifacts):
    to_disk, to_device = artifacts.add(b"as far as the disk"), artifacts.add(b"as far as the device")
    artifacts.gate = asyncio.Event()
    assert [await steer.prefetch(to_disk) for _ in range(2)] == [SOURCE, SOURCE]
    assert await steer.prefetch(to_device, to_device=True) == SOURCE
    artifacts.gate.set()
    await front.status_where(is_at(to_disk, DISK))
    await front.status_where(is_at(to_device, DEVICE))
    assert await steer.prefetch(to_disk) == DISK
    assert await steer.prefetch(to_device) == DEVICE
    assert await steer.prefetch(to_disk, to_device=True) == DISK
    await front.status_where(is_at(to_disk, DEVICE))
    assert artifacts.opened.total() == 2


async def test_a_prefetch_under_way_to_the_disk_goes_on_to_the_device_when_that_is_asked(front, steer, artifacts):
    digest = artifacts.add(b"first the disk, then the device")
    artifacts.gate = asyncio.Event()
    assert await steer.prefetch(digest) == SOURCE
    assert await steer.prefetch(digest, to_device=True) == SOURCE
    artifacts.gate.set()
    await front.status_where(is_at(digest, DEVICE))
    assert artifacts.opened[digest] == 1


async def test_a_prefetch_takes_the_place_of_what_was_used_of_late_only_for_a_request_that_could_not_wait(
    base, tmp_path, artifacts
):
    async with (
        serving_artifacts(artifacts) as port,
        running_front(base, tmp_path / "cache", registry_port=port, max_resident_adapters=2) as front,
    ):
        steer = Steer(front)
        first, second, ahead, refused = (artifacts.add(name * 1000) for name in (b"1", b"2", b"a", b"r"))
        for digest in (first, second):
            assert (await front.generate(front.request(artifact=digest, max_tokens=2))).finished
        await front.status_where(is_at(second, DEVICE))
        await steer.prefetch(ahead, to_device=True)
        await front.status_where(is_at(ahead, DISK))
        await steer.prefetch(refused, to_device=True, for_request=True)
        status = await front.status_where(is_at(refused, DEVICE))
        tiers = {digest: status["adapters"][digest].tier for digest in (first, second, ahead)}
        assert tiers[ahead] == DISK
        assert {tiers[first], tiers[second]} == {DISK, DEVICE}  # by what loading each took


async def test_a_prefetch_that_ends_before_it_began_is_no_fault(front, artifacts):
    steering, digest = front.app._steering, artifacts.add(b"never begun")
    steering.prefetch(CheckedAdapter("ab" * 32, digest), to_device=True)
    steering._prefetches[digest].cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    gc.collect()  # what was never awaited would warn now
    assert (steering._prefetches, steering._to_device, artifacts.opened[digest]) == ({}, {}, 0)


async def test_a_prefetch_that_fails_disturbs_nobody(front, steer, artifacts):
    assert await steer.prefetch("12" * 32, to_device=True) == SOURCE
    await front.status_where(lambda fields: not fields["adapters"] and artifacts.opened["12" * 32])
    assert len((await front.generate(front.request(max_tokens=3))).token_ids()) == 3


async def test_an_unloaded_adapter_is_gone_and_comes_again_when_asked_for(front, steer, artifacts):
    digest = artifacts.add(b"comes and goes")
    assert await steer.unload(digest) == NOWHERE
    await steer.load(digest)
    assert await steer.unload(digest) == DEVICE
    await front.status_where(is_at(digest, DISK))
    assert await steer.unload(digest, from_disk=True) == DISK
    await front.status_where(lambda fields: not fields["adapters"])
    answer = await front.generate(front.request(artifact=digest, max_tokens=2))
    assert answer.finished.facts.tier_hit == SOURCE
    assert artifacts.opened[digest] == 2


async def test_an_adapter_in_use_is_not_unloaded_not_even_right_after_its_request_was_sent(front, steer, artifacts):
    digest = artifacts.add(b"in use")
    artifacts.gate = asyncio.Event()  # so that the request lasts until it is opened
    answer = asyncio.create_task(front.generate(front.request(artifact=digest, max_tokens=200)))
    await front.status_where(lambda fields: digest in fields["adapters"])
    with pytest.raises(FailedPrecondition, match="requests on this worker use"):
        await steer.unload(digest, from_disk=True)
    artifacts.gate.set()
    assert len((await answer).token_ids()) == 200


async def test_an_unload_during_a_prefetch_ends_it(front, steer, artifacts):
    digest = artifacts.add(b"not wanted any more")
    artifacts.gate = asyncio.Event()
    await steer.prefetch(digest, to_device=True)
    await front.status_where(lambda fields: digest in fields["adapters"])
    await steer.unload(digest, from_disk=True)
    artifacts.gate.set()
    await front.status_where(lambda fields: not fields["adapters"])


async def test_a_pinned_adapter_outlasts_all_others_on_device_and_disk(base, tmp_path, artifacts):
    async with (
        serving_artifacts(artifacts) as port,
        running_front(base, tmp_path / "cache", registry_port=port, max_resident_adapters=2, cache_bytes=2500) as front,
    ):
        steer = Steer(front)
        kept = artifacts.add(b"k" * 1000)
        assert await steer.pin(kept) == SOURCE
        await front.status_where(is_at(kept, DEVICE, pinned=True))
        for name in b"abcd":
            digest = artifacts.add(bytes([name]) * 1000)
            assert (await front.generate(front.request(artifact=digest, max_tokens=2))).finished
        status = await front.status_where(is_at(kept, DEVICE, pinned=True))
        assert status["free_blocks"] == status["total_blocks"] - 1
        assert (tmp_path / "cache" / "artifacts" / kept).exists()
        with pytest.raises(FailedPrecondition, match="pinned"):
            await steer.unload(kept)
        assert [await steer.pin(kept) for _ in range(2)] == [DEVICE, DEVICE]
        assert [await steer.pin(kept, pinned=False) for _ in range(2)] == [DEVICE, DEVICE]
        await front.status_where(is_at(kept, DEVICE, pinned=False))
        assert await steer.unload(kept, from_disk=True) == DEVICE
        assert front.app._store.num_references == 0


async def test_pins_that_would_leave_no_room_are_refused_with_what_helps(front, steer, artifacts):
    first, second, third = (artifacts.add(bytes([n]) * 100) for n in range(3))
    await steer.pin(first)
    await steer.pin(second)
    with pytest.raises(ResourceExhausted, match="max_resident_adapters"):
        await steer.pin(third)
    too_large = artifacts.add(b"x" * 200_000)
    await steer.pin(second, pinned=False)
    with pytest.raises(ResourceExhausted, match="arena_bytes"):
        await steer.pin(too_large, size=200_000)
    status = await front.status_where(is_at(first, DEVICE, pinned=True))
    assert [digest for digest, adapter in status["adapters"].items() if adapter.pinned] == [first]


async def test_a_request_that_only_pins_leave_no_room_for_is_told_when_to_come_again(front, steer, artifacts):
    kept = artifacts.add(b"k" * 40_000)  # of 64 chunks of 4096 bytes
    large = artifacts.add(b"l" * 240_000)
    await steer.pin(kept, size=40_000)
    refused = await front.generate(front.request(artifact=large, max_tokens=2))
    assert isinstance(refused.error, DeviceFull)
    assert refused.error.retry_after_s == 1.0
    with pytest.raises(DeviceFull):
        await steer.load(large)
    await steer.pin(kept, pinned=False)
    assert (await front.generate(front.request(artifact=large, max_tokens=2))).finished


async def test_a_pin_whose_size_was_told_wrong_is_dropped_once_that_shows(front, steer, artifacts):
    digest = artifacts.add(b"x" * 200_000)
    await steer.pin(digest, size=1)
    await front.status_where(is_at(digest, DISK, pinned=False))


async def test_a_pinned_adapter_is_brought_as_soon_as_its_source_is_back(front, steer, artifacts):
    blob = b"late"
    digest = artifacts.add(blob)
    artifacts.break_after = [0] * 6  # as often as a download tries
    await steer.pin(digest)
    await front.status_where(is_at(digest, DEVICE, pinned=True))


async def test_pins_are_forgotten_when_the_engine_is_lost(front, steer, artifacts):
    digest = artifacts.add(b"pinned")
    await steer.pin(digest)
    before = await front.status_where(is_at(digest, DEVICE, pinned=True))
    (engine,) = [
        child for child in psutil.Process().children() if any("fake_engine_process" in part for part in child.cmdline())
    ]
    os.kill(engine.pid, signal.SIGKILL)
    status = await front.status_where(lambda fields: fields["epoch"] != before["epoch"] and fields["state"] == 2)
    assert not status["adapters"][digest].pinned
    assert front.app._store.num_references == 0
    await steer.pin(digest)
    await front.status_where(is_at(digest, DEVICE, pinned=True))


async def test_a_load_that_finds_no_room_in_time_is_told_so(base, tmp_path, artifacts, monkeypatch):
    told_long_before(monkeypatch)
    slow = {"STEP_S": "0.01", "CONTEXT": "4096", "TOTAL_BLOCKS": "1024"}
    async with (
        serving_artifacts(artifacts) as port,
        running_front(base, tmp_path / "cache", registry_port=port, max_resident_adapters=1, environment=slow) as front,
    ):
        used, other = artifacts.add(b"used"), artifacts.add(b"other")
        call = front.stub.Generate(front.request(artifact=used, max_tokens=4000))
        await call.read()
        await Steer(front).prefetch(other)
        await front.status_where(is_at(other, DISK))
        with pytest.raises(DeadlineUnreachable, match="did not find room") as refused:
            await Steer(front).load(other, within=TOLD_AFTER_1_S)
        assert refused.value.retry_after_s
        call.cancel()
        assert (await Steer(front).load(other)).tier_hit == DISK


async def test_who_leaves_during_a_load_leaves_nothing_behind(front, steer, artifacts):
    digest = artifacts.add(b"nobody waits for me")
    artifacts.gate = asyncio.Event()
    request = LoadAdapterRequest(base_digest=front.base_digest, adapter=resolved(digest))
    call = front.stub.LoadAdapter(request)
    await front.status_where(lambda fields: digest in fields["adapters"])
    call.cancel()
    await front.status_where(lambda fields: not fields["adapters"])
    assert front.app._store.num_references == 0
    artifacts.gate.set()


@pytest.mark.parametrize(
    ("change", "kind", "field"),
    [
        ({"base_digest": "ff" * 32}, BaseMismatch, "base_digest"),
        ({"base_digest": "no digest"}, InvalidRequest, "base_digest"),
        ({"adapter": None}, InvalidRequest, "adapter"),
        ({"adapter": ResolvedAdapter(version_digest="ab" * 32)}, InvalidRequest, "adapter.artifact_digest"),
        (
            {"adapter": ResolvedAdapter(version_digest="ab" * 32, artifact_digest="../../x", format="none")},
            InvalidRequest,
            "adapter.artifact_digest",
        ),
        (
            {"adapter": ResolvedAdapter(version_digest="ab" * 32, artifact_digest="ab" * 32, format="zip")},
            InvalidRequest,
            "adapter.format",
        ),
    ],
)
async def test_bad_fields_are_named(front, change, kind, field):
    fields = {"base_digest": front.base_digest, "adapter": resolved("ab" * 32), **change}
    for name, message in (
        ("LoadAdapter", LoadAdapterRequest),
        ("PrefetchAdapter", PrefetchAdapterRequest),
        ("PinAdapter", PinAdapterRequest),
    ):
        with pytest.raises(grpc.RpcError) as failed:
            await getattr(front.stub, name)(message(**fields))
        error = from_rpc_error(failed.value)
        assert isinstance(error, kind)
        assert error.field == field


async def test_unload_names_a_bad_digest_and_an_engine_that_is_away(front, monkeypatch):
    with pytest.raises(LoraplexError) as refused:
        await Steer(front).unload("not a digest")
    assert refused.value.field == "artifact_digest"
    with monkeypatch.context() as changed:
        changed.setattr(front.app._engine, "state", front.app._engine.state.DOWN)
        with pytest.raises(EngineDown):
            await Steer(front).unload("ab" * 32)
