"""Pins on their way from the registry to workers: sent, sent again, moved and undone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from common.backoff import Backoff
from loraplex import errors
from loraplex.async_client import AsyncClient
from loraplex.manifest import read_manifest
from loraplex.worker.v1 import worker_pb2
from router import orders, pins
from router.placement import rendezvous_weight
from tests.integration.router_fakes import (
    FakeRegistry,
    FakeWorker,
    adapter_entry,
    base_entry,
    digest,
    eventually,
    running_router,
)
from tests.running_registry import registry_here
from tests.tiny_adapters import write_adapter
from tests.tiny_base import write_tiny_base

SQL, NEW = digest("artifact sql"), digest("artifact new")


@pytest.fixture
def not_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers that stand still before they hear what an order has done do not give it once more."""
    monkeypatch.setattr(orders, "AGAIN", Backoff(first_s=100.0, longest_s=100.0))


@asynccontextmanager
async def registry_with(*entries: object) -> AsyncIterator[FakeRegistry]:
    fake = await FakeRegistry(base_entry(), *entries).start()  # type: ignore[arg-type]
    try:
        yield fake
    finally:
        await fake.stop()


@asynccontextmanager
async def workers_of(count: int) -> AsyncIterator[list[FakeWorker]]:
    workers = [await FakeWorker(worker_id=f"w{i}").start() for i in range(count)]
    try:
        yield workers
    finally:
        for worker in workers:
            await worker.stop()


def in_order(workers: list[FakeWorker], artifact: str) -> list[FakeWorker]:
    return sorted(workers, key=lambda worker: rendezvous_weight(artifact, worker.worker_id), reverse=True)


def pinned(worker: FakeWorker) -> set[str]:
    return {held.artifact_digest for held in worker.held.values() if held.pinned}


def holds(worker: FakeWorker, *artifacts: str) -> Callable[[], bool]:
    return lambda: pinned(worker) == set(artifacts)


async def test_two_routers_pin_to_the_same_worker_and_tell_it_again_after_its_engine_restarted(not_told_again: None):
    async with (
        registry_with(adapter_entry("sql", pin_replicas=1), adapter_entry("json")) as registry,
        workers_of(3) as workers,
    ):
        addresses = [worker.address for worker in workers]
        async with (
            running_router(registry.address, *addresses) as one,
            running_router(registry.address, *reversed(addresses)) as other,
        ):
            first, *others = in_order(workers, SQL)
            await eventually(holds(first, SQL))
            steering = [running.router._steering for running in (one, other)]
            await eventually(lambda: not any(each.unmet_pins() or each._deliveries.in_flight for each in steering))
            first.told.clear()
            await first.restart_engine("e2")
            await eventually(holds(first, SQL))
            assert 1 <= len(first.told) <= 2  # each router once at most
            assert [worker.told for worker in others] == [[], []]


async def test_a_pin_is_told_once_and_left_alone_while_it_holds(not_told_again: None):
    async with (
        registry_with(adapter_entry("sql", pin_replicas=1)) as registry,
        workers_of(1) as (worker,),
        running_router(registry.address, worker.address),
    ):
        await eventually(holds(worker, SQL))
        for running in range(3):
            await worker.set(running_requests=running)
            await asyncio.sleep(0.2)
        assert worker.told == [("pin", SQL)]


async def test_a_new_version_takes_the_old_ones_place_and_unpinning_lets_go(not_told_again: None):
    async with (
        registry_with(adapter_entry("sql", pin_replicas=1)) as registry,
        workers_of(1) as (worker,),
        running_router(registry.address, worker.address),
    ):
        await eventually(holds(worker, SQL))
        await registry.commit(adapter_entry("sql", "new", "sql", pin_replicas=1))
        await eventually(holds(worker, NEW))
        assert worker.told == [("pin", SQL), ("unpin", SQL), ("pin", NEW)]
        await registry.commit(adapter_entry("sql", "new", "sql"))
        await eventually(holds(worker))


async def test_without_the_registry_the_last_known_pins_stay(not_told_again: None):
    async with (
        registry_with(adapter_entry("sql", pin_replicas=1)) as registry,
        workers_of(1) as (worker,),
        running_router(registry.address, worker.address) as router,
    ):
        await eventually(holds(worker, SQL))
        await registry.stop()
        await eventually(lambda: not router.router.catalog.in_step)
        await worker.restart_engine("e2")
        await eventually(holds(worker, SQL))
        assert worker.told == [("pin", SQL), ("pin", SQL)]
        await registry.start()


async def test_a_pin_that_nobody_knows_of_is_undone_when_the_registry_is_back(
    monkeypatch: pytest.MonkeyPatch, not_told_again: None
):
    monkeypatch.setattr(pins, "UNDO_AFTER_S", 0.2)
    foreign = digest("artifact of nobody")
    async with (
        registry_with(adapter_entry("sql")) as registry,
        workers_of(1) as (worker,),
        running_router(registry.address, worker.address, adapter_policy=False) as router,
    ):
        await registry.stop()
        await eventually(lambda: not router.router.catalog.in_step)
        worker.held[foreign] = worker_pb2.AdapterResidency(artifact_digest=foreign, pinned=True)
        await worker.set()
        await asyncio.sleep(0.5)
        assert worker.told == []
        await registry.start()
        await eventually(holds(worker))
        assert worker.told == [("unpin", foreign)]


async def test_workers_of_another_base_are_left_alone():
    async with registry_with(adapter_entry("sql", pin_replicas=9)) as registry, workers_of(3) as workers:
        workers[1].base_digest = digest("another base")
        async with running_router(registry.address, *(worker.address for worker in workers)):
            await eventually(lambda: [pinned(worker) for worker in workers] == [{SQL}, set(), {SQL}])
            assert workers[1].told == []


async def test_a_pin_moves_from_a_worker_that_drains(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pins, "UNDO_AFTER_S", 0.3)
    async with (
        registry_with(adapter_entry("sql", pin_replicas=1)) as registry,
        workers_of(3) as workers,
        running_router(registry.address, *(worker.address for worker in workers)),
    ):
        first, second, third = in_order(workers, SQL)
        await eventually(holds(first, SQL))
        await first.set(worker_pb2.WORKER_STATE_DRAINING)
        await eventually(holds(second, SQL))
        await first.set(worker_pb2.WORKER_STATE_SERVING)  # it stayed after all: the second one lets go
        await eventually(holds(second))
        assert (pinned(first), third.told) == ({SQL}, [])


async def test_a_worker_that_refuses_is_asked_again_and_holds_nobody_up():
    entries = (adapter_entry("sql", pin_replicas=2), adapter_entry("json", pin_replicas=2))
    async with registry_with(*entries) as registry, workers_of(2) as (full, other):
        full.refuses = errors.ResourceExhausted("the arena is full of pinned adapters")
        async with running_router(registry.address, full.address, other.address) as router:
            both = (SQL, digest("artifact json"))
            await eventually(holds(other, *both))
            await eventually(lambda: len(router.router._steering.unmet_pins()) == 2)
            async with AsyncClient(router.address, registry.address) as client:
                told = [advice async for advice in client.list_advice()]
                assert [(advice.kind, advice.adapter, advice.worker_id) for advice in told] == [
                    ("unmet_pin", name, full.worker_id) for name in ("json", "sql")
                ]
                assert told[0].reason == "pinned on 1 of 2 workers; w0 refuses: the arena is full of pinned adapters"
                full.refuses = None
                await eventually(holds(full, *both))
                await eventually(lambda: router.router._steering.unmet_pins() == {})
                assert [advice async for advice in client.list_advice()] == []
            counted = router.router.metrics.render().decode()
            assert 'loraplex_router_adapter_orders_total{kind="pin",reason="RESOURCE_EXHAUSTED"}' in counted


async def test_a_pin_goes_from_a_real_registry_to_a_worker(tmp_path: Path):
    base = write_tiny_base(tmp_path / "base")
    folders = [write_adapter(tmp_path / f"adapter{seed}", base, seed=seed) for seed in (1, 2)]
    worker = await FakeWorker(base_digest=read_manifest(base).digest()).start()
    try:
        async with (
            registry_here(tmp_path / "state", pinned_adapters="listed") as registry,
            running_router(registry.address, worker.address) as router,
            AsyncClient(router.address, registry.address) as client,
        ):
            await client.add_base("tiny", read_manifest(base))
            listed = (await client.add_adapter("listed", folders[0])).adapter.current.artifact_digest
            await eventually(holds(worker, listed))
            mine = (await client.add_adapter("mine", folders[1])).adapter.current.artifact_digest
            assert (await client.pin_adapter("mine", 2)).changed
            await eventually(holds(worker, listed, mine))
            packed = (await client.repack_adapter("mine", "int8")).adapter.current.artifact_digest
            await eventually(holds(worker, listed, packed))
            await client.remove_adapter("mine")
            await eventually(holds(worker, listed))
    finally:
        await worker.stop()
