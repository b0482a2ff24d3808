"""The automatic policy of a running router: adapters come before their requests, unless it is off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc import aio

from common.backoff import Backoff
from common.config import load_settings
from loraplex.async_client import AsyncClient
from loraplex.credentials import Credentials
from loraplex.errors import DeadlineUnreachable, Unauthenticated, from_rpc_error
from loraplex.types.v1 import generation_pb2
from loraplex.worker.v1 import worker_pb2
from router import orders
from router.placement import rendezvous_weight
from router.settings import RouterSettings
from tests.integration.router_fakes import (
    BASE_ID,
    Event,
    FakeRegistry,
    FakeWorker,
    adapter_entry,
    base_entry,
    choice_finished,
    delta,
    digest,
    eventually,
    finished,
    running_router,
)

SQL, NEW = digest("artifact sql"), digest("artifact new")
SOON: dict[str, Any] = {"adapter_promote_rate": 0.01, "adapter_demote_rate": 0.001}
"""One request promotes an adapter."""


@pytest.fixture(autouse=True)
def not_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that stands still before it hears what an order has done does not give it once more."""
    monkeypatch.setattr(orders, "AGAIN", Backoff(first_s=100.0, longest_s=100.0))


@pytest.fixture
async def registry() -> AsyncIterator[FakeRegistry]:
    fake = await FakeRegistry(base_entry(), adapter_entry("sql"), adapter_entry("json")).start()
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


async def test_an_adapter_that_is_asked_for_is_brought_to_the_device_its_requests_go_to(
    registry: FakeRegistry, workers: list[FakeWorker]
):
    first, second, third = workers
    async with running_router(registry.address, *(worker.address for worker in workers), **SOON) as router:
        await router.generate("sql")
        await router.generate(BASE_ID)
        await eventually(lambda: first.told == [("to_device", SQL)])
        await eventually(lambda: second.told == [("to_disk", SQL)])
        await registry.commit(adapter_entry("sql", "new", "sql"))
        await eventually(lambda: ("to_device", NEW) in first.told + second.told + third.told)
        await registry.commit(adapter_entry("json", "json-2"))
        told = [call for worker in workers for call in worker.told]
        assert not any(digest("artifact json") in call or digest("artifact json-2") in call for call in told)


async def test_a_busy_workers_hot_adapter_gets_another_device(registry: FakeRegistry, workers: list[FakeWorker]):
    first, second, third = workers
    async with running_router(registry.address, *(worker.address for worker in workers), **SOON) as router:
        await router.generate("sql")
        await eventually(lambda: first.told == [("to_device", SQL)])
        await first.set(queued_prefill_tokens=50_000)
        await eventually(lambda: ("to_device", SQL) in second.told)
        assert ("to_device", SQL) not in third.told


async def test_a_router_that_is_told_so_fetches_nothing_ahead(registry: FakeRegistry, workers: list[FakeWorker]):
    addresses = [worker.address for worker in workers]
    async with running_router(registry.address, *addresses, **SOON, adapter_policy=False) as router:
        await router.generate("sql")
        await asyncio.sleep(1.5)  # a look of the policy would have come
        assert [worker.told for worker in workers] == [[], [], []]


async def test_an_adapter_that_requests_cannot_wait_for_is_brought_all_the_same(
    registry: FakeRegistry, workers: list[FakeWorker]
):
    huge = adapter_entry("huge")
    huge.adapter.current.artifact_bytes = 10**10  # more than a minute from its source, as routers take it
    await registry.commit(huge)
    addresses = [worker.address for worker in workers]
    async with running_router(registry.address, *addresses, adapter_policy=False) as router:
        await eventually(lambda: router.router.catalog.snapshot.revision == 2)
        with pytest.raises(aio.AioRpcError) as refused:
            await router.generate("huge", timeout_s=20)
        assert isinstance(from_rpc_error(refused.value), DeadlineUnreachable)
        await eventually(lambda: any(worker.told for worker in workers))
        told = [call for worker in workers for call in worker.told]
        assert told == [("for_request", digest("artifact huge"))]
        await eventually(lambda: any(view.adapters for view in router.router.fleet.views()))
        assert await router.generate("huge", timeout_s=20)
        with pytest.raises(aio.AioRpcError):
            await router.generate(BASE_ID, timeout_s=0.001)  # which needs no adapter
        assert [call for worker in workers for call in worker.told] == told


async def say_that_it_was_loaded(worker: FakeWorker, request: worker_pb2.GenerateRequest) -> AsyncIterator[Event]:
    yield delta("hello")
    yield choice_finished()
    event = finished(worker, request, 5, 1)
    event.finished.facts.tier_hit = generation_pb2.ADAPTER_TIER_DISK
    event.finished.facts.adapter_load_time.FromMilliseconds(500)
    yield event


async def test_advice_follows_from_what_the_answers_tell(registry: FakeRegistry, workers: list[FakeWorker]):
    worker = workers[0]
    worker.script = say_that_it_was_loaded
    settings: dict[str, Any] = {"adapter_rate_half_life_s": 10.0, "cluster_token": "the-token-of-this-test"}
    operator, client = Credentials(cluster_token="the-token-of-this-test"), Credentials()
    async with running_router(registry.address, worker.address, **settings) as router:
        traffic = router.router._steering._traffic
        now_s = traffic._clock()
        traffic._clock = lambda: now_s  # rates halve in 10 s, however long it takes to ask here
        for _ in range(20):
            await router.generate("sql")
        async with AsyncClient(router.address, registry.address, credentials=client) as anybody:
            with pytest.raises(Unauthenticated):
                _ = [advice async for advice in anybody.list_advice()]
        async with AsyncClient(router.address, registry.address, credentials=operator) as asking:
            promote, merge = [advice async for advice in asking.list_advice()]
            assert (promote.kind, promote.tenant, promote.adapter, promote.worker_id) == (
                "promote",
                "default",
                "sql",
                "",
            )
            assert promote.figures["cold_ratio"] == pytest.approx(1.0)
            assert promote.figures["mean_load_s"] == pytest.approx(0.5)
            assert (merge.kind, merge.adapter, merge.worker_id) == ("merge", "sql", worker.worker_id)
            assert "100% of" in merge.reason
            await registry.commit(adapter_entry("sql", pin_replicas=1))
            await eventually(lambda: router.router.catalog.snapshot.revision == 2)
            assert [advice.kind async for advice in asking.list_advice()] == ["merge"]
            await worker.set(dedicated_artifact_digest=SQL)
            await eventually(lambda: router.router.fleet.views()[0].dedicated_artifact_digest == SQL)
            assert [advice async for advice in asking.list_advice()] == []


def test_thresholds_that_would_make_adapters_flap_are_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        load_settings(RouterSettings, "router", ["--adapter-promote-rate=0.1", "--adapter-demote-rate=0.1"])
    assert "below adapter-promote-rate" in capsys.readouterr().err
