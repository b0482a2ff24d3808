"""How the router finds its workers, follows their state and spreads requests over them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from grpc import aio

from loraplex import errors
from loraplex.router.v1 import fleet_pb2, fleet_pb2_grpc, inference_pb2
from loraplex.types.v1 import generation_pb2
from loraplex.worker.v1 import worker_pb2
from router import discovery
from router.fleet import Fleet
from tests.integration.router_fakes import (
    BASE_ID,
    FakeRegistry,
    FakeWorker,
    RunningRouter,
    adapter_entry,
    babble_forever,
    base_entry,
    digest,
    eventually,
    never_answer,
    running_router,
)


@pytest.fixture
async def registry() -> AsyncIterator[FakeRegistry]:
    fake = await FakeRegistry(base_entry(), adapter_entry("sql"), adapter_entry("json", "new", "old")).start()
    yield fake
    await fake.stop()


@pytest.fixture
async def worker() -> AsyncIterator[FakeWorker]:
    fake = await FakeWorker().start()
    yield fake
    await fake.stop()


@pytest.fixture
async def other() -> AsyncIterator[FakeWorker]:
    fake = await FakeWorker(worker_id="w2").start()
    yield fake
    await fake.stop()


async def refusal(router: RunningRouter, model: str = "sql", **fields: object) -> errors.LoraplexError:
    with pytest.raises(aio.AioRpcError) as caught:
        await router.generate(model, **fields)  # type: ignore[arg-type]
    return errors.from_rpc_error(caught.value)


def text_of(events: list[inference_pb2.GenerateResponse]) -> str:
    return "".join(event.delta.text for event in events if event.HasField("delta"))


async def test_a_worker_that_comes_back_is_used_again(registry: FakeRegistry, worker: FakeWorker) -> None:
    async with running_router(registry.address, worker.address) as router:
        await worker.stop()
        await router.until_workers(0)
        error = await refusal(router)
        assert isinstance(error, errors.NoWorker)
        assert error.metadata["why"] == "none_reachable"
        worker.epoch = "e2"
        await worker.start()
        await router.until_workers(1)
        assert text_of(await router.generate("sql")) == "Hello adapter!"


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (worker_pb2.WORKER_STATE_DRAINING, "draining"),
        (worker_pb2.WORKER_STATE_STARTING, "starting"),
        (worker_pb2.WORKER_STATE_NOT_SERVING, "not_serving"),
    ],
)
async def test_workers_that_do_not_serve_get_nothing(
    registry: FakeRegistry, worker: FakeWorker, state: int, why: str
) -> None:
    await worker.set(state)
    async with running_router(registry.address, worker.address) as router:
        error = await refusal(router)
    assert isinstance(error, errors.NoWorker)
    assert error.metadata["why"] == why
    assert not worker.requests


async def test_a_worker_of_another_base_gets_nothing(registry: FakeRegistry, worker: FakeWorker) -> None:
    worker.base_digest = digest("another base")
    async with running_router(registry.address, worker.address) as router:
        error = await refusal(router)
    assert isinstance(error, errors.NoWorker)
    assert error.metadata["why"] == "no_such_base"
    assert not worker.requests


async def test_a_burst_spreads_before_any_status_counts_it(
    registry: FakeRegistry, worker: FakeWorker, other: FakeWorker
) -> None:
    worker.script = other.script = never_answer
    async with running_router(registry.address, worker.address, other.address) as router:
        calls = [
            router.inference.Generate(inference_pb2.GenerateRequest(model=BASE_ID, prompt="x " * 200), timeout=60)
            for _ in range(8)
        ]
        reading = [asyncio.ensure_future(call.read()) for call in calls]
        await eventually(lambda: worker.in_flight + other.in_flight == 8)
        assert worker.in_flight == other.in_flight == 4
        for call in calls:
            call.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        await eventually(lambda: all(view.own_requests == 0 for view in router.router.fleet.views()))


async def test_own_requests_count_until_the_announced_status_arrives(
    registry: FakeRegistry, worker: FakeWorker
) -> None:
    worker.script = babble_forever
    async with running_router(registry.address, worker.address) as router:
        fleet = router.router.fleet
        call = router.inference.Generate(inference_pb2.GenerateRequest(model=BASE_ID, prompt="x"), timeout=60)
        async for _ in call:
            break
        assert fleet.views()[0].own_requests == 1
        await worker.set(running_requests=1)  # its sequence is the one that Generate announced
        await eventually(lambda: fleet.views()[0].running_requests == 1)
        assert fleet.views()[0].own_requests == 0
        call.cancel()


async def test_the_fleet_is_listed_with_names_of_adapters(registry: FakeRegistry, worker: FakeWorker) -> None:
    residency = worker_pb2.AdapterResidency(
        artifact_digest=digest("artifact sql"), tier=generation_pb2.ADAPTER_TIER_DISK, in_flight=2
    )
    await worker.set(adapters=[residency], running_requests=3)
    async with running_router(registry.address, worker.address, "127.0.0.1:1", ready=False) as router:
        await router.until_workers(1)
        await eventually(lambda: all(view.error for view in router.router.fleet.views() if view.address.endswith(":1")))
        stub = fleet_pb2_grpc.FleetServiceStub(router.channel)
        workers = (await stub.ListWorkers(fleet_pb2.ListWorkersRequest())).workers
    lost, found = workers
    assert (found.worker_id, found.state, found.address, found.running_requests) == ("w1", "serving", worker.address, 3)
    assert (found.free_blocks, found.total_blocks, found.epoch) == (100, 128, "e1")
    assert (found.device, found.dtype, found.base_quantization) == ("cpu", "float32", "int8")
    assert [(list(a.names), a.tier, a.in_flight) for a in found.adapters] == [(["sql"], 3, 2)]
    assert found.status_age.ToTimedelta().total_seconds() < 10
    assert (lost.state, lost.address, lost.device) == ("unreachable", "127.0.0.1:1", "")
    assert lost.error


async def test_two_routers_agree_where_a_cold_adapter_belongs(registry: FakeRegistry) -> None:
    workers = [await FakeWorker(worker_id=f"w{i}").start() for i in range(4)]
    addresses = [worker.address for worker in workers]
    try:
        async with (
            running_router(registry.address, *addresses) as first,
            running_router(registry.address, *reversed(addresses)) as second,
        ):
            await first.generate("sql")
            await second.generate("sql")
            await second.generate("sql")
            await first.generate("sql")
        assert sorted(len(worker.requests) for worker in workers) == [0, 0, 0, 4]
    finally:
        for worker in workers:
            await worker.stop()


async def test_workers_are_found_by_name(registry: FakeRegistry, worker: FakeWorker) -> None:
    async with running_router(registry.address, workers=f"dns:localhost:{worker.port}") as router:
        await router.until_workers(1)
        assert text_of(await router.generate("sql")) == "Hello adapter!"


async def test_a_name_that_no_longer_lists_a_worker_keeps_it_until_its_stream_ends(
    registry: FakeRegistry, worker: FakeWorker, other: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = [worker.address, other.address]

    async def scripted(_: discovery.DnsWorkers) -> list[str]:
        return list(answer)

    monkeypatch.setattr(discovery, "look_up", scripted)
    fleet = Fleet(discovery.DnsWorkers("workers", 1), lookup_interval_s=0.02)
    following = asyncio.create_task(fleet.run())

    def reachable() -> set[str]:
        return {view.worker_id for view in fleet.views() if view.state.value == "serving"}

    await eventually(lambda: reachable() == {"w1", "w2"})
    answer.remove(other.address)
    await asyncio.sleep(0.2)
    assert reachable() == {"w1", "w2"}
    flight = fleet.begin(other.address, 1, "")
    await other.end_status_streams()
    await eventually(lambda: reachable() == {"w1"})
    assert len(fleet.views()) == 2  # a request is still on its channel
    flight.end()
    await eventually(lambda: len(fleet.views()) == 1)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_a_worker_reached_by_two_addresses_is_one_worker(registry: FakeRegistry, worker: FakeWorker) -> None:
    async with running_router(registry.address, worker.address, f"localhost:{worker.port}", ready=False) as router:
        await eventually(lambda: len(router.router.fleet._links) == 2)
        await eventually(lambda: all(link.connected for link in router.router.fleet._links.values()))
        assert [view.worker_id for view in router.router.fleet.views()] == ["w1"]


async def test_a_silent_worker_is_used_only_if_nothing_else_is(worker: FakeWorker, other: FakeWorker) -> None:
    now = 100.0
    fleet = Fleet(discovery.StaticWorkers((worker.address, other.address)), clock=lambda: now)
    following = asyncio.create_task(fleet.run())
    await eventually(lambda: all(view.state.value == "serving" for view in fleet.views()) and len(fleet.views()) == 2)
    now += 3.5
    await worker.set(running_requests=1)
    await eventually(lambda: [view.silent for view in fleet.views() if view.worker_id == "w1"] == [False])
    assert {view.worker_id for view in fleet.views() if view.silent} <= {"w2"}
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
