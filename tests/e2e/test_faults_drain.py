"""SIGTERM anywhere with streams in flight: they finish, what is new goes elsewhere, the exit status is 0."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from common.rpc import open_channel
from loraplex.client import AsyncClient, Finished
from loraplex.errors import Draining, LoraplexError, Unavailable
from loraplex.registry.v1 import adapter_pb2, adapter_pb2_grpc
from tests.e2e.fleet import Fleet
from tests.e2e.fleet_calls import (
    BASE,
    FOUND_S,
    ask,
    caught_up,
    found_again,
    is_answered,
    num_tokens,
    sampling,
    workers_where,
)
from tests.running_registry import upload_parts

WHOLE = 4500
"""Tokens of a stream that is open when the signal comes and is read to its end: some seconds."""
DRAIN_S = 65.0
"""Notice, drain and stop of the fleet's services at most."""


async def rest_of(events: AsyncIterator) -> int:
    """Read a stream that must end well; returns its remaining tokens."""
    got = [event async for event in events]
    assert isinstance(got[-1], Finished)
    return num_tokens(got)


async def refusal(client: AsyncClient) -> LoraplexError:
    """Ask until refused: for as long as balancers get to notice, a stopping router still answers."""
    while True:
        try:
            await ask(client, max_tokens=1)
        except LoraplexError as error:
            return error


async def open_both(fleet: Fleet, client: AsyncClient, stack, router: int = 0):
    """Open a gRPC and an HTTP stream of the base and wait for the first event of each."""
    over_grpc = client.generate(BASE, "x", sampling=sampling(WHOLE))
    first = num_tokens([await anext(over_grpc)])
    over_http = await stack.enter_async_context(fleet.stream(router=router, max_tokens=WHOLE))
    await over_http.first()
    return first, over_grpc, over_http


async def test_a_worker_that_is_stopped_finishes_its_streams_while_new_ones_go_to_the_other(fleet: Fleet):
    async with fleet.client() as client, AsyncExitStack() as stack:
        first, over_grpc, over_http = await open_both(fleet, client, stack)
        name = over_http.worker_id
        (other,) = {*fleet.workers} - {name}
        fleet.workers[name].send(signal.SIGTERM)
        signalled_s = time.monotonic()
        finishing = asyncio.gather(rest_of(over_grpc), over_http.rest())
        await workers_where(client, lambda all_: all_[name].state == "draining")
        for _ in range(4):
            assert (await ask(client)).facts.worker_id == other
        rest, lines = await finishing
        assert first + rest == WHOLE
        assert lines[-1] == "data: [DONE]"
        assert await fleet.workers[name].ended(DRAIN_S) == 0
        assert time.monotonic() - signalled_s < DRAIN_S
        await workers_where(client, lambda all_: all_[name].state == "unreachable", FOUND_S)


async def test_a_router_that_is_stopped_finishes_its_streams_while_the_other_takes_what_is_new(fleet: Fleet):
    async with fleet.client() as client, fleet.client(1) as other, AsyncExitStack() as stack:
        first, over_grpc, over_http = await open_both(fleet, client, stack)
        fleet.routers[0].send(signal.SIGTERM)
        signalled_s = time.monotonic()
        finishing = asyncio.gather(rest_of(over_grpc), over_http.rest())
        await fleet.routers[0].hears("router.draining")
        refused = await refusal(client)
        assert isinstance(refused, Draining)
        assert await is_answered(other)
        rest, lines = await finishing
        assert first + rest == WHOLE
        assert lines[-1] == "data: [DONE]"
        assert await fleet.routers[0].ended(DRAIN_S) == 0
        assert time.monotonic() - signalled_s < DRAIN_S


async def _upload(
    stub: adapter_pb2_grpc.AdapterServiceAsyncStub, parts: AsyncIterator[adapter_pb2.UploadArtifactRequest]
) -> adapter_pb2.Adapter:
    return (await stub.UploadArtifact(parts, timeout=60)).adapter


async def test_a_registry_that_is_stopped_finishes_an_upload_and_nobody_who_generates_notices(
    fleet: Fleet, long_adapter
):
    go_on = asyncio.Event()
    parts = upload_parts(long_adapter(11), "during-stop")

    async def slowly() -> AsyncIterator[adapter_pb2.UploadArtifactRequest]:
        for part in parts[:-1]:
            yield part
        await go_on.wait()
        yield parts[-1]

    async with fleet.client() as client, open_channel(fleet.registry.address) as channel:
        stub = adapter_pb2_grpc.AdapterServiceStub(channel)
        events = client.generate(BASE, "x", sampling=sampling(WHOLE))
        first = num_tokens([await anext(events)])
        before = set(fleet.incoming())
        upload = asyncio.create_task(_upload(stub, slowly()))
        async with asyncio.timeout(60):
            while not set(fleet.incoming()) - before:  # noqa: ASYNC110 - the upload is there before the signal
                await asyncio.sleep(0.02)
        fleet.registry.send(signal.SIGTERM)
        await fleet.registry.hears("registry.draining")
        with pytest.raises(LoraplexError) as refused:
            await client.add_adapter("too-late", long_adapter(12))
        assert isinstance(refused.value, Unavailable)
        assert not upload.done()
        go_on.set()
        adapter = await upload
        assert first + await rest_of(events) == WHOLE
        assert await fleet.registry.ended(DRAIN_S) == 0
        await asyncio.to_thread(fleet.registry.restart)
        kept = await found_again(lambda: client.get_adapter("during-stop"))
        assert kept.current.artifact_digest == adapter.current.artifact_digest


async def test_a_worker_that_is_stopped_during_a_download_still_answers_who_waits_for_it(fleet: Fleet, long_adapter):
    async with fleet.client() as client:
        added = await client.add_adapter("slow-to-come", long_adapter(21))
        digest = added.adapter.current.artifact_digest
        await caught_up(client)
        fleet.registry.send(signal.SIGSTOP)
        asking = asyncio.create_task(ask(client, "slow-to-come"))

        def is_fetching(workers) -> bool:
            return any(each.artifact_digest == digest and each.loading for w in workers.values() for each in w.adapters)

        workers = await workers_where(client, is_fetching)
        name = next(name for name, worker in workers.items() if worker.waiting_requests)
        fleet.workers[name].send(signal.SIGTERM)
        await fleet.workers[name].hears("worker.draining")
        assert await is_answered(client)  # by the other one
        fleet.registry.send(signal.SIGCONT)
        facts = (await asking).facts
        assert (facts.artifact_digest, facts.worker_id) == (digest, name)
        assert await fleet.workers[name].ended(DRAIN_S) == 0
