"""Requests for adapters that are not on the device, or cannot be had; and what status tells of tiers."""

from __future__ import annotations

import asyncio
import hashlib
import time

import pytest

from common.backoff import Backoff
from loraplex.errors import (
    ArtifactNotFound,
    ArtifactUnreachable,
    CorruptArtifact,
    DeadlineUnreachable,
    LoraplexError,
)
from loraplex.types.v1.generation_pb2 import AdapterTier
from tests.worker_front import TOLD_AFTER_1_S, running_front, serving_artifacts, told_long_before
from tests.worker_steering import DEVICE, DISK, SOURCE, Steer, is_at
from worker.adapters.cached_files import Stamp
from worker.adapters.pace import Pace
from worker.adapters.quarantine import Stage

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_an_artifact_that_is_nowhere_is_refused_at_once_for_a_while(front, steer, artifacts, monkeypatch):
    monkeypatch.setattr(
        "worker.adapters.quarantine.LASTING", Backoff(first_s=100.0, longest_s=300.0)
    )  # not over before it is seen
    digest = hashlib.sha256(b"never registered").hexdigest()
    first = await front.generate(front.request(artifact=digest))
    assert isinstance(first.error, ArtifactNotFound)
    status = await front.status_where(lambda fields: digest in fields["adapters"])
    assert status["adapters"][digest].quarantine_reason == "ARTIFACT_NOT_FOUND"
    assert 0 < status["adapters"][digest].quarantine_end_time.ToNanoseconds() / 1e9 - time.time() <= 100
    again = await front.generate(front.request(artifact=digest))
    assert isinstance(again.error, ArtifactNotFound)
    assert again.error.retry_after_s
    assert artifacts.opened[digest] == 1
    assert len((await front.generate(front.request(max_tokens=3))).token_ids()) == 3  # others are served


async def test_an_artifact_that_was_nowhere_is_tried_again_after_a_while(front, steer, artifacts):
    blob = b"registered a moment later"
    digest = hashlib.sha256(blob).hexdigest()
    assert isinstance((await front.generate(front.request(artifact=digest))).error, ArtifactNotFound)
    artifacts.add(blob)
    await front.status_where(lambda fields: not fields["adapters"])
    assert (await front.generate(front.request(artifact=digest, max_tokens=2))).finished
    assert (await front.status_where(is_at(digest, DEVICE)))["adapters"][digest].quarantine_reason == ""


async def test_an_explicit_load_tries_an_adapter_in_quarantine_at_once(front, steer, artifacts):
    blob = b"mended by an operator"
    digest = hashlib.sha256(blob).hexdigest()
    for failures in (1, 2):  # a failure of its own makes the pause longer
        front.app._access.quarantine.failed(digest, ArtifactNotFound("gone"), Stage.FETCH, time.monotonic() + 100)
        with pytest.raises(ArtifactNotFound):
            await steer.load(digest)
        assert artifacts.opened[digest] == failures
    refusal = (await front.generate(front.request(artifact=digest))).error
    assert isinstance(refusal, ArtifactNotFound)
    assert refusal.retry_after_s is not None
    assert refusal.retry_after_s > 1.5
    artifacts.add(blob)
    assert (await steer.load(digest)).tier_hit == SOURCE
    answer = await front.generate(front.request(artifact=digest, max_tokens=2))
    assert answer.finished.facts.tier_hit == DEVICE


async def test_unloading_from_the_disk_ends_a_quarantine_and_unloading_alone_does_not(front, steer, artifacts):
    digest = artifacts.add(b"mended meanwhile")
    front.app._access.quarantine.failed(digest, ArtifactNotFound("gone"), Stage.FETCH, time.monotonic() + 100)
    await steer.unload(digest)
    assert isinstance((await front.generate(front.request(artifact=digest))).error, ArtifactNotFound)
    await steer.unload(digest, from_disk=True)
    await front.status_where(lambda fields: digest not in fields["adapters"])
    assert (await front.generate(front.request(artifact=digest, max_tokens=2))).finished


async def test_a_file_that_somebody_changes_on_the_disk_is_fetched_again_before_its_next_request(
    front, steer, artifacts
):
    digest = artifacts.add(b"as it should be")
    await steer.load(digest)
    await steer.unload(digest)
    (front.app._settings.cache_dir / "artifacts" / digest).write_bytes(b"as it shouldnt ")
    answer = await front.generate(front.request(artifact=digest, max_tokens=2))
    assert answer.finished.facts.tier_hit == SOURCE
    assert artifacts.opened[digest] == 2


async def test_a_file_that_rots_on_the_disk_is_fetched_again_without_a_quarantine(front, steer, artifacts):
    digest = artifacts.add(b"as it should be")
    await steer.load(digest)
    await steer.unload(digest)
    path = front.app._settings.cache_dir / "artifacts" / digest
    path.write_bytes(b"corrupt on disk")
    front.app._store._files.find(digest).stamp = Stamp.of(path.stat())  # the file system knows of no change
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
    front, steer, artifacts, monkeypatch
):
    slow = artifacts.add(b"slow" * 100)
    await steer.load(slow)
    await steer.unload(slow)
    monkeypatch.setattr(front.app._access, "_loads", Pace())  # the front is other tests' too
    front.app._access.loaded(slow, 400, 60.0)  # so loads are slow, as it believes
    answer = await front.generate(front.request(artifact=slow), within=20)
    assert isinstance(answer.error, DeadlineUnreachable)
    assert 20 < (answer.error.retry_after_s or 0) < 61
    await front.status_where(is_at(slow, DEVICE))
    answer = await front.generate(front.request(artifact=slow, max_tokens=2))
    assert answer.finished.facts.tier_hit == DEVICE
    assert answer.finished.facts.adapter_load_time.ToNanoseconds() == 0


async def test_a_fetch_that_outlasts_a_request_goes_on_to_the_device_and_one_whose_client_leaves_does_not(
    front, steer, artifacts, monkeypatch
):
    told_long_before(monkeypatch)
    monkeypatch.setattr("worker.adapters.progress.PATIENCE_S", 100.0)  # the first part may take as long as it takes
    blob = bytes(100_000)
    digest = artifacts.add(blob)
    artifacts.gate, artifacts.gate_at = asyncio.Event(), 1 << 16  # the first part comes
    for _ in range(2):
        answer = await front.generate(front.request(artifact=digest), within=TOLD_AFTER_1_S)
        assert isinstance(answer.error, DeadlineUnreachable)
        assert "it goes on coming" in answer.error.message  # it was waited for, not refused at once
        assert answer.error.retry_after_s
    left = artifacts.add(b"whose client leaves")
    artifacts.gate_at = 0
    call = front.stub.Generate(front.request(artifact=left))
    await front.status_where(lambda fields: left in fields["adapters"] and fields["adapters"][left].loading)
    call.cancel()
    await front.status_where(lambda fields: left not in fields["adapters"])
    artifacts.gate.set()
    await front.status_where(is_at(digest, DEVICE))
    assert artifacts.opened[digest] == 1
    answer = await front.generate(front.request(artifact=digest, max_tokens=2))
    assert answer.finished.facts.tier_hit == DEVICE


async def test_a_request_that_does_not_get_its_turn_is_told_so_before_its_deadline(
    base, tmp_path, artifacts, monkeypatch
):
    told_long_before(monkeypatch)
    slow = {"STEP_S": "0.01", "CONTEXT": "4096", "TOTAL_BLOCKS": "1024"}
    async with (
        serving_artifacts(artifacts) as port,
        running_front(base, tmp_path / "cache", registry_port=port, max_resident_adapters=1, environment=slow) as front,
    ):
        call = front.stub.Generate(front.request(artifact=artifacts.add(b"used"), max_tokens=4000))
        await call.read()
        other = artifacts.add(b"other")
        await Steer(front).prefetch(other)
        await front.status_where(is_at(other, DISK))
        answers = await asyncio.gather(
            *(front.generate(front.request(artifact=other), within=TOLD_AFTER_1_S) for _ in range(3)),
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
    assert (on_device.budget_bytes, on_device.max_adapters) == (64 * 4096, 3)
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
