"""What tests ask of a fleet and what they wait for in it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from loraplex.client import AsyncClient, Completion, Event, Gatherer, Sampling, TextDelta
from loraplex.errors import LoraplexError, Unavailable
from loraplex.records import Worker

BASE = "long"
FOUND_S = 8.0
"""A peer that is back must be found within about two seconds; the rest is for a machine that stands still meanwhile."""

T = TypeVar("T")


def sampling(max_tokens: int, **fields: Any) -> Sampling:
    """Greedy, of exactly so many tokens."""
    return Sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **fields)


async def ask(client: AsyncClient, model: str = BASE, max_tokens: int = 4, **options: Any) -> Completion:
    """Return a whole generation."""
    wanted = sampling(max_tokens, **options.pop("sampling", {}))
    gatherer = Gatherer()
    async for event in client.generate(model, "x", sampling=wanted, **options):
        gatherer.add(event)
    return gatherer.completion()


async def is_answered(client: AsyncClient) -> bool:
    """Ask, and tell whether as many tokens came as were asked for."""
    return (await ask(client, max_tokens=4)).usage.completion_tokens == 4


def num_tokens(events: list[Event]) -> int:
    """Count the tokens in a stream's events."""
    return sum(len(event.token_ids) for event in events if isinstance(event, TextDelta))


async def any_base(client: AsyncClient) -> None:
    """Make a call to the registry."""
    async for _ in client.list_bases():
        return


async def found_again(call: Callable[[], Awaitable[T]], within_s: float = FOUND_S) -> T:
    """Make a call until its peer, which has just come back, is found; calls fail at once until the channel has."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            return await call()
        except Unavailable:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.05)


async def caught_up(client: AsyncClient, within_s: float = 60.0) -> None:
    """Wait until the client's router knows what the client has written: longer than a router alone waits for it."""

    async def any_model() -> None:
        async for _ in client.list_models():
            return

    await found_again(any_model, within_s)


async def failure(events: AsyncIterator[Event]) -> tuple[LoraplexError, list[Event]]:
    """Read a stream that must fail; returns the error and what came before it."""
    got: list[Event] = []
    try:
        async for event in events:
            got.append(event)
    except LoraplexError as error:
        return error, got
    raise AssertionError(f"the stream ended well after {num_tokens(got)} tokens")


async def workers_where(
    client: AsyncClient, wanted: Callable[[dict[str, Worker]], bool], timeout_s: float = 60.0
) -> dict[str, Worker]:
    """Wait for what a router knows of its workers; it can only be asked."""
    deadline = time.monotonic() + timeout_s
    while True:
        workers = {worker.worker_id: worker async for worker in client.list_workers()}
        if wanted(workers):
            return workers
        assert time.monotonic() < deadline, workers
        await asyncio.sleep(0.02)


def is_idle(worker: Worker) -> bool:
    """True where a worker serves and holds nothing for anyone."""
    counts = worker.running_requests, worker.waiting_requests, worker.queued_prefill_tokens
    held = sum(adapter.in_flight for adapter in worker.adapters)
    loading = any(adapter.loading for adapter in worker.adapters)
    return (
        worker.state == "serving"
        and counts == (0, 0, 0)
        and held == 0
        and not loading
        and worker.free_blocks == worker.total_blocks > 0
    )


async def until_idle(client: AsyncClient, timeout_s: float = 60.0) -> dict[str, Worker]:
    """Wait until both workers serve and have everything back."""
    return await workers_where(
        client, lambda workers: len(workers) == 2 and all(map(is_idle, workers.values())), timeout_s
    )


async def working(client: AsyncClient, requests: int = 1) -> str:
    """Return the worker that computes so many requests."""
    workers = await workers_where(
        client, lambda all_: any(worker.running_requests == requests for worker in all_.values())
    )
    return next(worker.worker_id for worker in workers.values() if worker.running_requests == requests)
