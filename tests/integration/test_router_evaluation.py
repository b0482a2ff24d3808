"""FleetService.EvaluateAdapter: which worker evaluates, and what the caller is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from grpc import aio

from loraplex import credentials, errors
from loraplex.router.v1 import fleet_pb2, fleet_pb2_grpc
from loraplex.types.v1 import evaluation_pb2
from loraplex.worker.v1 import worker_pb2
from tests.integration.router_fakes import (
    BASE,
    FakeRegistry,
    FakeWorker,
    RunningRouter,
    base_entry,
    digest,
    eventually,
    running_router,
)

REQUEST = fleet_pb2.EvaluateAdapterRequest(
    base_digest=BASE,
    version_digest=digest("version"),
    artifact_digest=digest("int8"),
    exact_artifact_digest=digest("exact"),
)


@pytest.fixture
async def registry() -> AsyncIterator[FakeRegistry]:
    fake = await FakeRegistry(base_entry()).start()
    yield fake
    await fake.stop()


@pytest.fixture
async def workers() -> AsyncIterator[list[FakeWorker]]:
    fakes = [await FakeWorker(worker_id=name).start() for name in ("w1", "w2")]
    yield fakes
    for fake in fakes:
        await fake.stop()


def call(router: RunningRouter, request=REQUEST, **options):
    return fleet_pb2_grpc.FleetServiceStub(router.channel).EvaluateAdapter(request, **{"timeout": 30, **options})


async def outcome(router: RunningRouter, request=REQUEST, **options):
    """Return the events of a call, and the error that ended it."""
    events = []
    try:
        async for event in call(router, request, **options):
            events.append(event)
    except aio.AioRpcError as error:
        return events, errors.from_rpc_error(error)
    return events, None


def refusing(error: errors.LoraplexError, *, after_progress: bool = False):
    async def script(worker: FakeWorker, request: worker_pb2.EvaluateAdapterRequest):
        if after_progress:
            yield worker_pb2.EvaluateAdapterResponse(progress=evaluation_pb2.EvaluationProgress(total_prompts=9))
        raise error

    return script


async def never_done(worker: FakeWorker, request: worker_pb2.EvaluateAdapterRequest):
    yield worker_pb2.EvaluateAdapterResponse(progress=evaluation_pb2.EvaluationProgress(total_prompts=9))
    await asyncio.Event().wait()


async def test_a_worker_s_progress_and_figures_come_to_the_caller(registry, workers) -> None:
    async with running_router(registry.address, workers[0].address) as router:
        events, error = await outcome(router, timeout=30)
        assert error is None
        assert [event.WhichOneof("event") for event in events] == ["progress", "evaluation"]
        found = events[-1].evaluation
        assert (found.version_digest, found.artifact_digest, found.exact_artifact_digest, found.base_digest) == (
            digest("version"),
            digest("int8"),
            digest("exact"),
            BASE,
        )
        assert 0 < (workers[0].time_remaining_s[0] or 0) < 60  # the caller's 30, not the 600 of those without one
        assert router.router.fleet.num_flights == 0


@pytest.mark.parametrize("error", [errors.QueueFull("one at a time"), errors.Draining("it drains")])
async def test_another_worker_is_tried_where_the_first_has_not_begun(registry, workers, error) -> None:
    async with running_router(registry.address, *(worker.address for worker in workers)) as router:
        events, _ = await outcome(router)
        first = next(worker for worker in workers if worker.worker_id == events[-1].evaluation.device)
        first.evaluation = refusing(error)
        events, none = await outcome(router)
        assert none is None
        assert events[-1].evaluation.device == ({"w1", "w2"} - {first.worker_id}).pop()


async def test_both_being_busy_is_told_as_that(registry, workers) -> None:
    for worker in workers:
        worker.evaluation = refusing(errors.QueueFull("one at a time"))
    async with running_router(registry.address, *(worker.address for worker in workers)) as router:
        events, error = await outcome(router)
        assert (events, type(error)) == ([], errors.QueueFull)
    async with running_router(registry.address, workers[0].address) as router:
        assert isinstance((await outcome(router))[1], errors.QueueFull)


@pytest.mark.parametrize(
    ("error", "after_progress"), [(errors.BaseMismatch("no"), False), (errors.EngineDown("it died"), True)]
)
async def test_what_another_worker_cannot_mend_is_told_at_once(registry, workers, error, after_progress) -> None:
    for worker in workers:
        worker.evaluation = refusing(error, after_progress=after_progress)
    async with running_router(registry.address, *(worker.address for worker in workers)) as router:
        _, told = await outcome(router)
        assert type(told) is type(error)
        assert sum(len(worker.time_remaining_s) for worker in workers) == 1


async def test_a_base_that_no_worker_has_is_told(registry, workers) -> None:
    async with running_router(registry.address, workers[0].address) as router:
        _, error = await outcome(router, fleet_pb2.EvaluateAdapterRequest(base_digest=digest("other")))
        assert isinstance(error, errors.NoWorker)
        assert "no reachable worker has base model" in error.message


async def test_a_caller_who_leaves_cancels_it_on_the_worker(registry, workers) -> None:
    (worker, _) = workers
    worker.evaluation = never_done
    async with running_router(registry.address, worker.address) as router:
        asked = call(router)
        await asked.read()
        assert worker.in_flight == 1
        asked.cancel()
        await worker.until(lambda: worker.num_cancelled == 1 and worker.in_flight == 0)
        await eventually(lambda: router.router.fleet.num_flights == 0)


async def test_a_worker_that_dies_in_the_middle_is_told(registry, workers) -> None:
    (worker, _) = workers
    worker.evaluation = never_done
    async with running_router(registry.address, worker.address) as router:
        asked = call(router)
        await asked.read()
        await worker.stop()
        with pytest.raises(aio.AioRpcError) as caught:
            await asked.read()
        assert isinstance(errors.from_rpc_error(caught.value), errors.WorkerLost)
        assert router.router.fleet.num_flights == 0


async def test_a_router_that_stops_ends_it_as_draining(registry, workers) -> None:
    (worker, _) = workers
    worker.evaluation = never_done
    async with running_router(registry.address, worker.address) as router:
        asked = call(router)
        await asked.read()
        router.router._evaluations.cut_all(errors.Draining("this router is shutting down"))
        with pytest.raises(aio.AioRpcError) as caught:
            await asked.read()
        assert isinstance(errors.from_rpc_error(caught.value), errors.Draining)
        assert isinstance((await outcome(router))[1], errors.Draining)


async def test_it_is_for_operators(registry, workers) -> None:
    token = "t" * 40
    async with running_router(registry.address, workers[0].address, cluster_token=token) as router:
        assert isinstance((await outcome(router))[1], errors.Unauthenticated)
        assert isinstance((await outcome(router, metadata=credentials.bearer("wrong")))[1], errors.Unauthenticated)
        assert (await outcome(router, metadata=credentials.bearer(token)))[1] is None


async def test_a_dedicated_worker_is_not_asked_as_its_base_is_not_the_base(registry, workers) -> None:
    workers[0].status = {"dedicated_artifact_digest": REQUEST.artifact_digest}
    async with running_router(registry.address, workers[0].address, workers[1].address) as router:
        for _ in range(4):
            events, error = await outcome(router)
            assert error is None
            assert events[-1].evaluation.device == "w2"
    async with running_router(registry.address, workers[0].address) as router:
        events, error = await outcome(router)
        assert (events, type(error)) == ([], errors.NoWorker)
        assert error.metadata["why"] == "dedicated"
