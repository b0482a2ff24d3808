"""What clients see when a process dies, hangs or is cut off, and how soon all is well again. Real processes."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from contextlib import AsyncExitStack

import psutil
import pytest

from loraplex.client import AsyncClient
from loraplex.errors import (
    ArtifactUnreachable,
    DeadlineExceeded,
    EngineDown,
    LoraplexError,
    RegistryUnavailable,
    Unavailable,
    WorkerLost,
)
from tests.e2e.fleet import Fleet, Service
from tests.e2e.fleet_calls import (
    BASE,
    FOUND_S,
    ask,
    caught_up,
    failure,
    found_again,
    is_answered,
    is_idle,
    sampling,
    until_idle,
    workers_where,
    working,
)

LONG = 16000
"""Tokens of a stream that no test sees the end of."""
AT_ONCE_S = 8.0
"""Less than any time-out, and than such a stream takes; enough for a machine that stands still twice."""


async def start_stream(client: AsyncClient, **options):
    """Open a long stream and wait for its first event."""
    events = client.generate(BASE, "x", sampling=sampling(LONG), **options)
    await anext(events)
    return events


async def on_one_worker(fleet: Fleet, client: AsyncClient, stack):
    """Open a gRPC and an HTTP stream on the same worker; returns both and the worker's name."""
    over_grpc = await start_stream(client)
    name = await working(client)
    for _ in range(20):
        over_http = await stack.enter_async_context(fleet.stream(max_tokens=LONG))
        await over_http.first()
        if over_http.worker_id == name:
            return over_grpc, over_http, name
        await over_http.response.aclose()
    raise AssertionError("placement never chose the same worker twice")


async def served_again(client: AsyncClient, service: Service, within_s: float = FOUND_S) -> None:
    """Wait until the router sees a worker serve that has just become ready."""
    workers = await workers_where(
        client, lambda all_: service.name in all_ and all_[service.name].state == "serving", within_s
    )
    assert workers[service.name].address == service.address


def check_broken_off(lines: list[str]) -> dict[str, str]:
    """Return the error of a broken SSE stream: one `error` event at its end, no [DONE]."""
    events = [at for at, line in enumerate(lines) if line == "event: error"]
    assert events == [len(lines) - 2], lines[-4:]
    assert not any("[DONE]" in line for line in lines)
    error: dict[str, str] = json.loads(lines[-1].removeprefix("data: "))["error"]
    return error


async def test_a_killed_worker_fails_its_streams_at_once_and_the_other_worker_goes_on(fleet: Fleet):
    async with fleet.client() as client, AsyncExitStack() as stack:
        over_grpc, over_http, name = await on_one_worker(fleet, client, stack)
        (other,) = {*fleet.workers} - {name}
        engine = fleet.workers[name].engine()
        killed_s = time.monotonic()
        fleet.workers[name].send(signal.SIGKILL)
        (error, _), lines = await asyncio.gather(failure(over_grpc), over_http.rest())
        assert time.monotonic() - killed_s < AT_ONCE_S
        assert isinstance(error, WorkerLost)
        assert check_broken_off(lines)["code"] == "worker_lost"
        assert (await ask(client)).facts.worker_id == other
        assert psutil.wait_procs([engine], timeout=60)[1] == []  # it does not outlive its front end

        fleet.workers[other].kill()
        with pytest.raises(Unavailable):
            await ask(client)
        await asyncio.to_thread(fleet.workers[name].restart)
        await served_again(client, fleet.workers[name])
        assert (await ask(client)).facts.worker_id == name


async def test_a_killed_engine_costs_its_streams_only_and_comes_back_under_a_new_epoch(fleet: Fleet):
    async with fleet.client() as client, AsyncExitStack() as stack:
        over_grpc, over_http, name = await on_one_worker(fleet, client, stack)
        worker = fleet.workers[name]
        before = (await workers_where(client, lambda _: True))[name]
        killed_s = time.monotonic()
        worker.engine().kill()
        (error, _), lines = await asyncio.gather(failure(over_grpc), over_http.rest())
        assert time.monotonic() - killed_s < AT_ONCE_S
        assert isinstance(error, EngineDown)
        assert check_broken_off(lines)["code"] == "engine_down"
        assert (await ask(client)).facts.worker_id != name
        after = (await workers_where(client, lambda all_: is_idle(all_[name])))[name]
        assert after.epoch != before.epoch
        assert worker.runs  # the same process: nobody restarts it here
        assert worker.engine().is_running()


async def test_an_engine_that_hangs_is_noticed_killed_and_replaced(fleet: Fleet):
    async with fleet.client() as client:
        events = await start_stream(client)
        name = await working(client)
        stopped = fleet.workers[name].engine()
        stopped.suspend()
        hung_s = time.monotonic()
        error, _ = await failure(events)
        assert isinstance(error, EngineDown)
        assert 3 < time.monotonic() - hung_s < 60  # --engine-silence-s 5
        assert psutil.wait_procs([stopped], timeout=60)[1] == []
        await workers_where(client, lambda all_: is_idle(all_[name]))


async def told_that_it_is_unreachable(client: AsyncClient, model: str, within_s: float) -> None:
    """Ask until the reason is told before the deadline: it is not if a process stands still as the deadline comes."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            await ask(client, model, timeout_s=within_s)
        except ArtifactUnreachable:
            return
        except DeadlineExceeded:
            continue
    raise AssertionError(f"{model} was never told to be unreachable within {within_s:g} s")


async def test_without_the_registry_what_is_cached_is_served_and_what_is_not_is_unreachable(fleet: Fleet, long_adapter):
    async with fleet.client() as client, fleet.client(1) as other_router:
        await client.add_adapter("warm", long_adapter(1))
        cold = (await client.add_adapter("cold", long_adapter(2))).adapter.current
        other_router.min_revision = client.min_revision
        for each in (client, other_router):
            await caught_up(each)
        warm = await ask(client, "warm")
        events = await start_stream(client)
        fleet.registry.kill()
        again = await ask(client, "warm")
        assert again.facts.artifact_digest == warm.facts.artifact_digest
        async with asyncio.timeout(30):
            with pytest.raises(ArtifactUnreachable):
                await ask(client, "cold", timeout_s=60.0)  # which outlasts all tries
        await told_that_it_is_unreachable(client, "cold", within_s=2.0)  # which does not
        with pytest.raises(RegistryUnavailable):
            await client.add_adapter("late", long_adapter(3))
        await anext(events)
        await events.aclose()

        await asyncio.to_thread(fleet.registry.restart)
        back_s = time.monotonic()
        added = await found_again(lambda: client.add_adapter("late", long_adapter(3)))
        for each in (client, other_router):  # both follow its changes again
            each.min_revision = added.revision
            await caught_up(each, FOUND_S)
            assert (await ask(each, "late")).facts.artifact_digest == added.adapter.current.artifact_digest
        answer = await found_again(lambda: ask(client, "cold"))  # of any tier: a refusal has it come meanwhile
        assert answer.facts.artifact_digest == cold.artifact_digest
        assert time.monotonic() - back_s < 3 * FOUND_S


async def test_a_killed_router_leaves_the_other_with_the_same_models_and_workers(fleet: Fleet):
    async with fleet.client() as client, fleet.client(1) as other:
        models = [model async for model in client.list_models()]
        events = await start_stream(client)
        fleet.routers[0].send(signal.SIGKILL)
        error, _ = await failure(events)
        assert isinstance(error, Unavailable)
        assert [model async for model in other.list_models()] == models
        await until_idle(other, AT_ONCE_S)  # the dead router's stream is cancelled on its worker too
        assert await is_answered(other)
        await asyncio.to_thread(fleet.routers[0].kill)
        await asyncio.to_thread(fleet.routers[0].restart)
        await found_again(lambda: until_idle(client, FOUND_S))  # the client's own connection is found again as well
        assert await is_answered(client)


async def test_a_worker_that_is_cut_off_is_the_last_choice_until_it_is_heard_again(fleet: Fleet):
    async with fleet.client() as client:
        events = await start_stream(client, timeout_s=6.0)
        opened_s = time.monotonic()
        name = await working(client)
        (other,) = {*fleet.workers} - {name}
        fleet.workers[name].send(signal.SIGSTOP)
        await workers_where(client, lambda all_: all_[name].status_age_s > 3.0)
        for _ in range(6):
            assert (await ask(client)).facts.worker_id == other
        error, _ = await failure(events)
        assert isinstance(error, DeadlineExceeded)
        assert time.monotonic() - opened_s < 12
        fleet.workers[other].kill()
        with pytest.raises(LoraplexError) as refused:  # there is nothing else, so it is tried
            await ask(client, timeout_s=1.0)
        assert isinstance(refused.value, DeadlineExceeded)
        fleet.workers[name].send(signal.SIGCONT)
        await workers_where(client, lambda all_: is_idle(all_[name]), FOUND_S)
        assert (await ask(client)).facts.worker_id == name
