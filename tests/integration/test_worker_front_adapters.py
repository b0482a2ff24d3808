"""LoadAdapter, PrefetchAdapter, UnloadAdapter and PinAdapter on a front end with a real engine process."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import psutil
import pytest
import pytest_asyncio

from loraplex.errors import (
    ArtifactNotFound,
    ArtifactUnreachable,
    BaseMismatch,
    CorruptArtifact,
    DeadlineUnreachable,
    EngineDown,
    FailedPrecondition,
    InvalidRequest,
    LoraplexError,
    ResourceExhausted,
    from_rpc_error,
)
from loraplex.types.v1.generation_pb2 import AdapterTier
from loraplex.worker.v1.worker_pb2 import (
    LoadAdapterRequest,
    PinAdapterRequest,
    PrefetchAdapterRequest,
    ResolvedAdapter,
    UnloadAdapterRequest,
)
from tests.tiny_base import write_tiny_base
from tests.worker_front import ArtifactServer, Front, running_front, serving_artifacts
from worker.adapters.quarantine import Stage

pytestmark = pytest.mark.asyncio(loop_scope="module")

NOWHERE = AdapterTier.ADAPTER_TIER_UNSPECIFIED
DEVICE = AdapterTier.ADAPTER_TIER_DEVICE
DISK = AdapterTier.ADAPTER_TIER_DISK
SOURCE = AdapterTier.ADAPTER_TIER_SOURCE


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_tiny_base(tmp_path_factory.mktemp("adapters") / "base")


@pytest.fixture(scope="module", name="served")
def fixture_served() -> ArtifactServer:
    return ArtifactServer()  # type: ignore[abstract]  # it serves downloads alone


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="shared")
async def fixture_shared(base, served, tmp_path_factory) -> AsyncIterator[Front]:
    cache = tmp_path_factory.mktemp("cache")
    async with (
        serving_artifacts(served) as port,
        running_front(base, cache, registry_port=port, max_resident_adapters=3) as running,
    ):
        yield running


@pytest.fixture
def artifacts(served: ArtifactServer) -> ArtifactServer:
    """The artifacts of all tests, with nothing said of this one's yet."""
    served.opened.clear()
    served.break_after.clear()
    served.gate = None
    return served


@pytest_asyncio.fixture(loop_scope="module", name="front")
async def fixture_front(shared) -> AsyncIterator[Front]:
    """One front end for most tests, which each leaves as it found it: without adapters."""
    yield shared
    sentences = shared.app._access.quarantine._sentences
    for digest in list(sentences):
        del sentences[digest]
        shared.app._adapter_changed(digest)
    status = await shared.status_where(
        lambda fields: not any(adapter.in_flight or adapter.loading for adapter in fields["adapters"].values())
    )
    for digest in status["adapters"]:
        await Steer(shared).pin(digest, pinned=False)
        await Steer(shared).unload(digest, from_disk=True)
    await shared.status_where(lambda fields: not fields["adapters"])


def resolved(digest: str, **fields: Any) -> ResolvedAdapter:
    return ResolvedAdapter(version_digest="ab" * 32, artifact_digest=digest, rank=4, format="none", **fields)


class Steer:
    """The RPCs as a router calls them."""

    def __init__(self, front: Front) -> None:
        self.front = front

    async def load(self, digest: str, within: float = 20) -> Any:
        request = LoadAdapterRequest(base_digest=self.front.base_digest, adapter=resolved(digest))
        return await self._call("LoadAdapter", request, within)

    async def prefetch(self, digest: str, *, to_device: bool = False) -> int:
        request = PrefetchAdapterRequest(
            base_digest=self.front.base_digest, adapter=resolved(digest), to_device=to_device
        )
        return (await self._call("PrefetchAdapter", request)).tier  # type: ignore[no-any-return]

    async def unload(self, digest: str, *, from_disk: bool = False) -> int:
        request = UnloadAdapterRequest(artifact_digest=digest, from_disk=from_disk)
        return (await self._call("UnloadAdapter", request)).tier  # type: ignore[no-any-return]

    async def pin(self, digest: str, *, pinned: bool = True, size: int = 0) -> int:
        adapter = resolved(digest, artifact_bytes=size)
        request = PinAdapterRequest(base_digest=self.front.base_digest, adapter=adapter, pinned=pinned)
        return (await self._call("PinAdapter", request)).tier  # type: ignore[no-any-return]

    async def _call(self, name: str, request: Any, within: float = 20) -> Any:
        try:
            return await getattr(self.front.stub, name)(request, timeout=within)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None


@pytest.fixture
def steer(front: Front) -> Steer:
    return Steer(front)


def is_at(digest: str, tier: int, **facts: Any) -> Any:
    def check(fields: dict[str, Any]) -> bool:
        known = fields["adapters"].get(digest)
        if known is None or known.loading:
            return False
        return bool(known.tier == tier) and all(getattr(known, name) == value for name, value in facts.items())

    return check


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
    answers = await asyncio.gather(*(steer.load(digest) for _ in range(5)))
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
    answer = asyncio.create_task(front.generate(front.request(artifact=digest, max_tokens=200)))
    await front.status_where(lambda fields: digest in fields["adapters"])
    with pytest.raises(FailedPrecondition, match="requests on this worker use"):
        await steer.unload(digest, from_disk=True)
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


async def test_a_pin_whose_size_was_told_wrong_is_dropped_once_that_shows(front, steer, artifacts):
    digest = artifacts.add(b"x" * 200_000)
    await steer.pin(digest, size=1)
    await front.status_where(is_at(digest, DISK, pinned=False))


async def test_a_pinned_adapter_is_brought_as_soon_as_its_source_is_back(front, steer, artifacts):
    blob = b"late"
    digest = artifacts.add(blob)
    artifacts.break_after = [0] * 6  # as often as a download tries
    await steer.pin(digest)
    await front.status_where(is_at(digest, DEVICE, pinned=True), within=20)


async def test_pins_are_forgotten_when_the_engine_is_lost(front, steer, artifacts):
    digest = artifacts.add(b"pinned")
    await steer.pin(digest)
    before = await front.status_where(is_at(digest, DEVICE, pinned=True))
    (engine,) = [
        child for child in psutil.Process().children() if any("fake_engine_process" in part for part in child.cmdline())
    ]
    os.kill(engine.pid, signal.SIGKILL)
    status = await front.status_where(
        lambda fields: fields["epoch"] != before["epoch"] and fields["state"] == 2, within=20
    )
    assert not status["adapters"][digest].pinned
    assert front.app._store.num_references == 0
    await steer.pin(digest)
    await front.status_where(is_at(digest, DEVICE, pinned=True))


async def test_a_load_that_finds_no_room_in_time_is_told_so(base, tmp_path, artifacts):
    slow = {"STEP_S": "0.01", "CONTEXT": "4096", "TOTAL_BLOCKS": "1024"}
    async with (
        serving_artifacts(artifacts) as port,
        running_front(base, tmp_path / "cache", registry_port=port, max_resident_adapters=1, environment=slow) as front,
    ):
        used, other = artifacts.add(b"used"), artifacts.add(b"other")
        call = front.stub.Generate(front.request(artifact=used, max_tokens=4000))
        await call.read()
        with pytest.raises(DeadlineUnreachable) as refused:
            await Steer(front).load(other, within=0.5)
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


async def test_an_artifact_that_is_nowhere_is_refused_at_once_until_it_is_tried_again(front, steer, artifacts):
    blob = b"registered a moment later"
    digest = hashlib.sha256(blob).hexdigest()
    first = await front.generate(front.request(artifact=digest))
    assert isinstance(first.error, ArtifactNotFound)
    status = await front.status_where(lambda fields: digest in fields["adapters"])
    assert status["adapters"][digest].quarantine_reason == "ARTIFACT_NOT_FOUND"
    assert 0 < status["adapters"][digest].quarantine_end_time.ToNanoseconds() / 1e9 - time.time() <= 1
    again = await front.generate(front.request(artifact=digest))
    assert isinstance(again.error, ArtifactNotFound)
    assert again.error.retry_after_s
    assert artifacts.opened[digest] == 1
    assert len((await front.generate(front.request(max_tokens=3))).token_ids()) == 3  # others are served
    artifacts.add(blob)
    await front.status_where(lambda fields: not fields["adapters"])
    assert (await front.generate(front.request(artifact=digest, max_tokens=2))).finished
    assert (await front.status_where(is_at(digest, DEVICE)))["adapters"][digest].quarantine_reason == ""


async def test_a_file_that_was_damaged_on_the_disk_is_fetched_again_without_a_quarantine(front, steer, artifacts):
    digest = artifacts.add(b"as it should be")
    await steer.load(digest)
    await steer.unload(digest)
    (front.app._settings.cache_dir / "artifacts" / digest).write_bytes(b"corrupt on disk")
    answer = await front.generate(front.request(artifact=digest))
    assert isinstance(answer.error, CorruptArtifact)
    await front.status_where(lambda fields: digest not in fields["adapters"])
    answer = await front.generate(front.request(artifact=digest, max_tokens=2))
    assert answer.finished.facts.tier_hit == SOURCE
    assert artifacts.opened[digest] == 2


async def test_a_source_that_comes_back_ends_the_quarantines_it_caused(base, tmp_path, artifacts):
    digest = artifacts.add(b"cached nowhere")
    async with serving_artifacts(artifacts) as port:
        pass
    async with running_front(base, tmp_path / "cache", registry_port=port) as front:
        front.app._access.quarantine.failed(digest, ArtifactUnreachable("away"), Stage.FETCH, time.monotonic() + 100)
        refused = await front.generate(front.request(artifact=digest))
        assert isinstance(refused.error, ArtifactUnreachable)
        assert (refused.error.retry_after_s or 0) > 50
        async with serving_artifacts(artifacts, port):
            await front.status_where(lambda fields: not fields["adapters"])
            assert (await front.generate(front.request(artifact=digest, max_tokens=2))).finished


async def test_a_deadline_that_the_load_cannot_meet_is_refused_at_once_and_the_adapter_comes_all_the_same(
    front, steer, artifacts
):
    slow = artifacts.add(b"slow" * 100)  # 0.2 s
    await steer.load(slow)
    await steer.unload(slow)
    answer = await front.generate(front.request(artifact=slow), within=0.15)
    assert isinstance(answer.error, DeadlineUnreachable)
    assert 0.15 < (answer.error.retry_after_s or 0) < 5
    assert not front.app._engine.adapters.get(slow) or front.app._engine.adapters[slow].loading
    await front.status_where(is_at(slow, DEVICE))
    answer = await front.generate(front.request(artifact=slow, max_tokens=2))
    assert answer.finished.facts.tier_hit == DEVICE
    assert answer.finished.facts.adapter_load_time.ToNanoseconds() == 0


async def test_a_request_that_does_not_get_its_turn_is_told_so_before_its_deadline(base, tmp_path, artifacts):
    slow = {"STEP_S": "0.01", "CONTEXT": "4096", "TOTAL_BLOCKS": "1024"}
    async with (
        serving_artifacts(artifacts) as port,
        running_front(base, tmp_path / "cache", registry_port=port, max_resident_adapters=1, environment=slow) as front,
    ):
        call = front.stub.Generate(front.request(artifact=artifacts.add(b"used"), max_tokens=4000))
        await call.read()
        other = artifacts.add(b"other")
        await Steer(front).prefetch(other)
        await front.status_where(is_at(other, DISK), within=20)
        answers = await asyncio.gather(
            *(front.generate(front.request(artifact=other), within=3) for _ in range(3)),
            front.generate(front.request(max_tokens=3)),
        )
        for refused in answers[:3]:
            assert isinstance(refused.error, DeadlineUnreachable)
            assert refused.error.retry_after_s
        assert len(answers[3].token_ids()) == 3
        call.cancel()
        assert (await front.generate(front.request(artifact=other, max_tokens=2))).finished


async def test_a_rank_above_the_limit_is_refused_with_its_field(base, tmp_path):
    async with running_front(base, tmp_path / "cache", max_rank=3) as front:
        answer = await front.generate(front.request(artifact="ab" * 32))
        assert answer.error is not None
        assert (answer.error.reason, answer.error.field) == ("UNSUPPORTED_ADAPTER", "adapter.rank")
        with pytest.raises(LoraplexError) as refused:
            await Steer(front).load("ab" * 32)
        assert refused.value.field == "adapter.rank"


async def test_status_tells_how_full_each_tier_is(front, steer, artifacts):
    device, disk = artifacts.add(b"d" * 5000), artifacts.add(b"k" * 3000)
    await steer.load(device)
    await steer.prefetch(disk)
    status = await front.status_where(is_at(disk, DISK))
    on_device, on_disk = status["device_tier"], status["disk_tier"]
    assert (on_device.used_bytes, on_device.num_adapters) == (5000, 1)
    assert on_device.budget_bytes == 64 * 4096
    assert (on_disk.used_bytes, on_disk.budget_bytes, on_disk.num_adapters) == (8000, 8 * 2**30, 2)
    assert "host_tier" not in status
    await steer.unload(device, from_disk=True)
    status = await front.status_where(lambda fields: fields["disk_tier"].num_adapters == 1)
    assert status["device_tier"].used_bytes == 0


async def test_an_adapter_that_left_the_device_is_told_and_served_from_host_memory_where_there_is_any(
    base, tmp_path, artifacts
):
    async with (
        serving_artifacts(artifacts) as port,
        running_front(
            base, tmp_path / "cache", registry_port=port, max_resident_adapters=1, host_cache_bytes=2500
        ) as front,
    ):
        steer = Steer(front)
        first, second, third = (artifacts.add(bytes([n]) * 1000) for n in (7, 8, 9))
        for digest in (first, second):
            assert (await front.generate(front.request(artifact=digest, max_tokens=2))).finished
        status = await front.status_where(is_at(first, AdapterTier.ADAPTER_TIER_HOST))
        tier = status["host_tier"]
        assert (tier.used_bytes, tier.budget_bytes, tier.num_adapters) == (2000, 2500, 2)
        answer = await front.generate(front.request(artifact=first, max_tokens=2))
        assert answer.finished.facts.tier_hit == AdapterTier.ADAPTER_TIER_HOST
        assert answer.finished.facts.adapter_load_time.ToNanoseconds() > 0
        await steer.load(third)  # the copy that came first leaves
        await front.status_where(is_at(first, DISK))
        await front.status_where(is_at(second, AdapterTier.ADAPTER_TIER_HOST))
