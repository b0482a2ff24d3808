"""Requests for adapters whose files have left the disk, and that the engine has, has just lost, or has a copy of."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from common.adapter_format.packed import PackedAdapter, PackedModule, pack
from common.backoff import Backoff
from loraplex.errors import ArtifactNotFound, ArtifactUnreachable, DeadlineUnreachable, EngineDown, VersionMismatch
from tests.worker_front import (
    TOLD_AFTER_1_S,
    ArtifactServer,
    Front,
    running_front,
    serving_artifacts,
    told_long_before,
)
from tests.worker_steering import DEVICE, HOST, NOWHERE, SOURCE, Steer, is_at
from worker.adapters import quarantine
from worker.adapters.quarantine import Stage
from worker.mailbox import AdapterOnDevice
from worker.status import Tier

pytestmark = pytest.mark.asyncio(loop_scope="module")

VERSION = "ab" * 32
"""What `Front.request` names."""
SIZE = 3000


@pytest.fixture
def packed(tmp_path: Path, artifacts: ArtifactServer) -> Callable[[], str]:
    """Serve one packed adapter more, of some SIZE bytes, and return its digest."""
    made = iter(range(100))

    def make() -> str:
        a = np.full((1, 500), next(made), np.float32)
        module = PackedModule("layers.0.self_attn.q_proj", 1, 1.0, "F32", a, np.ones((64, 1), np.float32))
        path = tmp_path / "packed"
        pack(PackedAdapter(VERSION, "cd" * 32, "none", (module,)), path)
        assert SIZE * 0.7 < path.stat().st_size < SIZE
        return artifacts.add(path.read_bytes())

    return make


@pytest_asyncio.fixture(loop_scope="module", name="small")
async def fixture_small(base, tmp_path, artifacts) -> AsyncIterator[Front]:
    """A front end whose disk has room for one adapter, and its device for many."""
    async with (
        serving_artifacts(artifacts) as port,
        running_front(base, tmp_path / "cache", registry_port=port, cache_bytes=SIZE) as front,
    ):
        yield front


async def resident_without_file(front: Front, packed: Callable[[], str]) -> str:
    """Have an adapter on the device whose file gave way to another's."""
    digest, other = packed(), packed()
    await Steer(front).load(digest)
    await Steer(front).load(other)
    assert not front.app._store.holds(digest)
    await front.status_where(is_at(digest, DEVICE))
    return digest


def believe_it_is_there(front: Front, digest: str) -> None:
    """Let the front end believe that the device still holds an adapter: as it does until it has heard that it left."""
    front.app._engine.adapters[digest] = AdapterOnDevice(digest, loading=False, in_flight=0, device_bytes=SIZE)


async def left_without_file(front: Front, packed: Callable[[], str]) -> str:
    """Have an adapter that has just left the device, of which the front end does not know, and no file."""
    digest = await resident_without_file(front, packed)
    await Steer(front).unload(digest)
    believe_it_is_there(front, digest)
    return digest


def answers_counted(front: Front, tier: Tier) -> float | None:
    return front.app._metrics.registry.get_sample_value("loraplex_worker_adapter_requests_total", {"tier": tier.value})


async def test_an_adapter_on_the_device_is_served_without_its_file_and_without_its_source(small, artifacts, packed):
    digest = await resident_without_file(small, packed)
    artifacts.blobs.clear()
    small.app._access.quarantine.failed(digest, ArtifactUnreachable("away"), Stage.FETCH, time.monotonic() + 100)
    for _ in range(2):
        facts = (await small.generate(small.request(artifact=digest, max_tokens=3, n=2))).finished.facts
        assert (facts.tier_hit, facts.adapter_load_time.ToNanoseconds()) == (DEVICE, 0)
    assert (await Steer(small).load(digest)).tier_hit == DEVICE
    assert artifacts.opened[digest] == 1
    status = await small.status_where(is_at(digest, DEVICE))
    assert status["adapters"][digest].quarantine_reason == ""  # for it refuses nobody
    wrong = small.request(artifact=digest, max_tokens=2)
    wrong.adapter.version_digest = "12" * 32
    assert isinstance((await small.generate(wrong)).error, VersionMismatch)
    assert small.app._store.num_references == 0


@pytest.mark.parametrize("change", [Path.unlink, Path.touch, lambda path: path.write_bytes(bytes(SIZE))])
async def test_what_happens_to_the_file_of_an_adapter_on_the_device_concerns_no_request(
    front, steer, artifacts, packed, change
):
    digest = packed()
    assert (await steer.load(digest)).tier_hit == SOURCE
    await front.status_where(is_at(digest, DEVICE))
    change(front.app._settings.cache_dir / "artifacts" / digest)
    artifacts.blobs.clear()
    facts = (await front.generate(front.request(artifact=digest, max_tokens=3))).finished.facts
    assert (facts.tier_hit, facts.adapter_load_time.ToNanoseconds()) == (DEVICE, 0)
    assert (await steer.load(digest)).tier_hit == DEVICE
    assert artifacts.opened[digest] == 1


async def test_one_that_has_just_left_is_fetched_once_before_its_request_begins(small, artifacts, packed):
    digest = await left_without_file(small, packed)
    artifacts.gate = asyncio.Event()
    answer = asyncio.create_task(small.generate(small.request(artifact=digest, max_tokens=3, n=3)))
    await small.status_where(lambda fields: fields.get("waiting_requests") == 3 and artifacts.opened[digest] == 2)
    others = await small.generate(small.request(max_tokens=3))
    assert len(others.token_ids()) == 3
    artifacts.gate.set()
    facts = (await answer).finished.facts
    assert facts.tier_hit == SOURCE
    assert facts.adapter_load_time.ToNanoseconds() > 0
    assert artifacts.opened[digest] == 2
    assert answers_counted(small, Tier.SOURCE) == 1
    assert small.app._store.num_references == 0
    again = await small.generate(small.request(artifact=digest, max_tokens=3))
    assert again.token_ids() == (await answer).token_ids()
    assert again.finished.facts.tier_hit == DEVICE
    assert (answers_counted(small, Tier.SOURCE), answers_counted(small, Tier.DEVICE)) == (1, 1)


async def test_one_that_has_left_and_cannot_be_had_is_refused_with_the_reason(small, artifacts, packed):
    digest = await left_without_file(small, packed)
    artifacts.blobs.clear()
    refused = await small.generate(small.request(artifact=digest, max_tokens=3, n=2))
    assert isinstance(refused.error, ArtifactNotFound)
    assert not refused.messages
    assert len((await small.generate(small.request(max_tokens=3))).token_ids()) == 3
    await nothing_is_left(small)


async def nothing_is_left(front: Front) -> None:
    await front.status_where(lambda f: f.get("waiting_requests") == 0 and f.get("running_requests") == 0)
    async with asyncio.timeout(30):
        while front.app._store.num_references or front.app._engine.num_requests:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)


async def test_who_leaves_or_runs_out_of_time_while_the_file_comes_leaves_nothing_behind(
    small, artifacts, packed, monkeypatch
):
    told_long_before(monkeypatch)
    digest = await left_without_file(small, packed)
    artifacts.gate = asyncio.Event()
    call = small.stub.Generate(small.request(artifact=digest, max_tokens=3))
    await small.status_where(lambda fields: artifacts.opened[digest] == 2)
    call.cancel()
    await nothing_is_left(small)
    believe_it_is_there(small, digest)
    refused = await small.generate(small.request(artifact=digest, max_tokens=3), within=TOLD_AFTER_1_S)
    assert isinstance(refused.error, DeadlineUnreachable)
    await nothing_is_left(small)


async def test_an_engine_that_is_lost_while_the_file_comes_is_told_at_once(small, artifacts, packed):
    digest = await left_without_file(small, packed)
    artifacts.gate = asyncio.Event()
    answer = asyncio.create_task(small.generate(small.request(artifact=digest, max_tokens=3)))
    await small.status_where(lambda fields: artifacts.opened[digest] == 2)
    os.kill(small.app._engine._link.pid, signal.SIGKILL)
    assert isinstance((await answer).error, EngineDown)  # though the file has not come
    await nothing_is_left(small)
    artifacts.gate.set()
    await small.status_where(lambda fields: fields.get("state") == 2)
    assert (await small.generate(small.request(artifact=digest, max_tokens=2))).finished.facts.tier_hit == SOURCE


async def test_a_copy_in_host_memory_serves_without_file_and_source_and_leaves_with_the_file(
    base, tmp_path, artifacts, packed, monkeypatch
):
    monkeypatch.setattr(quarantine, "LASTING", Backoff(first_s=100.0, longest_s=300.0))  # not over before it is seen
    async with (
        serving_artifacts(artifacts) as port,
        running_front(
            base, tmp_path / "cache", registry_port=port, cache_bytes=SIZE, host_cache_bytes=10 * SIZE
        ) as front,
    ):
        digest, steer = await resident_without_file(front, packed), Steer(front)
        await steer.unload(digest)
        await front.status_where(is_at(digest, HOST))
        blobs = dict(artifacts.blobs)
        artifacts.blobs.clear()
        assert await steer.prefetch(digest) == HOST
        assert (await front.generate(front.request(artifact=digest, max_tokens=2))).finished.facts.tier_hit == HOST
        await front.status_where(is_at(digest, DEVICE))
        await nothing_is_left(front)
        assert await steer.unload(digest, from_disk=True) == DEVICE
        assert await steer.prefetch(digest) == SOURCE  # at once: what was unloaded is told with it
        await front.status_where(
            lambda fields: (
                digest in fields["adapters"] and fields["adapters"][digest].quarantine_reason == "ARTIFACT_NOT_FOUND"
            )
        )
        artifacts.blobs.update(blobs)
        await steer.load(digest)
        await steer.unload(digest)
        assert await steer.unload(digest, from_disk=True) == HOST
        assert await steer.unload(digest, from_disk=True) == NOWHERE
