"""Operators' calls that say where an adapter shall be, and what the fleet's list tells of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from loraplex import errors
from loraplex.async_client import AsyncClient
from loraplex.credentials import Credentials
from loraplex.records import AdapterOutcome, TierUse, Worker
from loraplex.types.v1 import generation_pb2
from loraplex.worker.v1 import worker_pb2
from router.placement import rendezvous_weight
from tests.integration.router_fakes import (
    BASE_ID,
    FakeRegistry,
    FakeWorker,
    adapter_entry,
    base_entry,
    digest,
    running_router,
)

SQL = digest("artifact sql")


@pytest.fixture
async def registry() -> AsyncIterator[FakeRegistry]:
    fake = await FakeRegistry(base_entry(), adapter_entry("sql", "sql", "old")).start()
    yield fake
    await fake.stop()


@pytest.fixture
async def workers() -> AsyncIterator[list[FakeWorker]]:
    """Three workers, in the order in which requests for a cold `sql` would go to them."""
    ids = sorted(("w0", "w1", "w2"), key=lambda name: rendezvous_weight(SQL, name), reverse=True)
    fakes = [await FakeWorker(worker_id=name).start() for name in ids]
    yield fakes
    for fake in fakes:
        await fake.stop()


@pytest.fixture
async def client(registry: FakeRegistry, workers: list[FakeWorker]) -> AsyncIterator[AsyncClient]:
    async with (
        running_router(registry.address, *(worker.address for worker in workers)) as router,
        AsyncClient(router.address, registry.address) as client,
    ):
        yield client


async def until_told(client: AsyncClient, condition: Callable[[dict[str, Worker]], object]) -> dict[str, Worker]:
    """Wait until the router's list of workers, by id, is so; returns it."""
    async with asyncio.timeout(30):
        while not condition(found := {worker.worker_id: worker async for worker in client.list_workers()}):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return found


async def refused(call: Any, kind: type[errors.LoraplexError]) -> errors.LoraplexError:
    with pytest.raises(kind) as caught:
        await call
    return caught.value


async def test_a_prefetch_goes_where_requests_would_go(client: AsyncClient, workers: list[FakeWorker]):
    first, second, third = workers
    assert await client.prefetch_adapter("sql") == [AdapterOutcome(first.worker_id, "source")]
    assert first.told == [("to_disk", SQL)]
    await client.prefetch_adapter("sql", num_workers=2, to_device=True)
    assert (first.told[1:], second.told, third.told) == ([("to_device", SQL)], [("to_device", SQL)], [])
    assert len(await client.prefetch_adapter("sql", num_workers=99)) == 3


async def test_what_is_on_a_device_already_is_where_requests_go(client: AsyncClient, workers: list[FakeWorker]):
    first, _, third = workers
    await client.load_adapter("sql", worker_id=third.worker_id)
    await until_told(client, lambda found: found[third.worker_id].adapters)
    await client.prefetch_adapter("sql")
    assert (first.told, third.told) == ([], [("load", SQL), ("to_disk", SQL)])


async def test_dedicated_workers_are_left_alone_unless_named(client: AsyncClient, workers: list[FakeWorker]):
    first, second, third = workers
    on_device = worker_pb2.AdapterResidency(artifact_digest=SQL, tier=generation_pb2.ADAPTER_TIER_DEVICE)
    for worker in (first, second):
        await worker.set(dedicated_artifact_digest=SQL, adapters=[on_device])
    await until_told(client, lambda found: [bool(w.adapters) for w in found.values()].count(True) == 2)
    assert [outcome.worker_id for outcome in await client.load_adapter("sql", num_workers=3)] == [third.worker_id]
    await client.prefetch_adapter("sql", num_workers=3)
    await until_told(client, lambda found: found[third.worker_id].adapters)
    await client.unload_adapter("sql")
    assert (first.told, second.told) == ([], [])
    assert [what for what, _ in third.told] == ["load", "to_disk", "unload"]
    await client.load_adapter("sql", worker_id=first.worker_id)
    assert first.told == [("load", SQL)]


async def test_a_version_is_asked_for_by_its_digest(client: AsyncClient, workers: list[FakeWorker]):
    old = digest("artifact old")
    await client.prefetch_adapter(f"sql@{old[:12]}", worker_id=workers[1].worker_id)
    assert workers[1].told == [("to_disk", old)]


async def test_a_load_tells_where_the_adapter_came_from(client: AsyncClient, workers: list[FakeWorker]):
    (outcome,) = await client.load_adapter("sql")
    assert (outcome.worker_id, outcome.tier, outcome.load_s) == (workers[0].worker_id, "source", 0.0)
    (outcome,) = await client.load_adapter("sql", worker_id=workers[0].worker_id)
    assert outcome.tier == "device"


async def test_unloading_reaches_those_that_hold_it_even_before_they_have_told_so(
    client: AsyncClient, workers: list[FakeWorker]
):
    assert await client.unload_adapter("sql") == []
    await client.prefetch_adapter("sql", num_workers=2, to_device=True)
    outcomes = await client.unload_adapter("sql", from_disk=True)
    assert {(outcome.worker_id, outcome.tier) for outcome in outcomes} == {
        (worker.worker_id, "device") for worker in workers[:2]
    }
    assert [worker.told[-1] for worker in workers] == [("unload from disk", SQL)] * 3
    assert [worker.held for worker in workers] == [{}, {}, {}]


async def test_one_refusal_of_several_is_an_outcome_and_a_refusal_of_all_an_error(
    client: AsyncClient, workers: list[FakeWorker]
):
    workers[0].refuses = errors.NoSpace("the disk is full")
    outcomes = await client.prefetch_adapter("sql", num_workers=2)
    assert [outcome.error_reason for outcome in outcomes] == ["NO_SPACE", ""]
    error = await refused(client.prefetch_adapter("sql"), errors.NoSpace)
    assert error.message == "the disk is full"


async def test_what_cannot_be_is_refused_with_the_field(client: AsyncClient, workers: list[FakeWorker]):
    error = await refused(client.prefetch_adapter("sql", worker_id="w9"), errors.NotFound)
    assert (error.field, "w0, w1, w2" in error.message) == ("worker_id", True)
    await refused(client.load_adapter("other"), errors.ModelNotFound)
    error = await refused(client.unload_adapter(BASE_ID), errors.InvalidParameter)
    assert error.field == "name"
    for worker in workers:
        await worker.set(worker_pb2.WORKER_STATE_DRAINING)
    await until_told(client, lambda found: {worker.state for worker in found.values()} == {"draining"})
    assert (await refused(client.prefetch_adapter("sql"), errors.NoWorker)).metadata["why"] == "draining"
    assert not any(worker.told for worker in workers)


async def test_these_calls_are_for_operators(registry: FakeRegistry, workers: list[FakeWorker]):
    async with (
        running_router(registry.address, workers[0].address, cluster_token="the-token-of-this-test") as router,
        AsyncClient(router.address, registry.address, credentials=Credentials()) as anybody,
    ):
        for call in (anybody.prefetch_adapter("sql"), anybody.load_adapter("sql"), anybody.unload_adapter("sql")):
            await refused(call, errors.Unauthenticated)
    assert not workers[0].told


async def test_the_list_tells_tiers_pins_and_quarantines(client: AsyncClient, workers: list[FakeWorker]):
    bad = worker_pb2.AdapterResidency(
        artifact_digest=SQL,
        tier=generation_pb2.ADAPTER_TIER_DISK,
        pinned=True,
        artifact_bytes=1000,
        quarantine_reason="CORRUPT_ARTIFACT",
    )
    bad.quarantine_end_time.FromSeconds(1_800_000_000)
    await workers[0].set(
        adapters=[bad],
        device_tier=worker_pb2.TierUse(used_bytes=5, budget_bytes=50, num_adapters=1, max_adapters=9),
        disk_tier=worker_pb2.TierUse(used_bytes=6, budget_bytes=60, num_adapters=2),
    )
    worker_id = workers[0].worker_id
    found = (await until_told(client, lambda found: found[worker_id].device_tier))[worker_id]
    assert (found.device_tier, found.host_tier, found.disk_tier) == (TierUse(5, 50, 1, 9), None, TierUse(6, 60, 2))
    (entry,) = found.adapters
    assert (entry.pinned, entry.artifact_bytes, entry.quarantine_reason) == (True, 1000, "CORRUPT_ARTIFACT")
    assert entry.quarantine_end_time is not None
    assert entry.quarantine_end_time.timestamp() == 1_800_000_000
