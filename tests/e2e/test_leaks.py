"""Streams that end, well or not, leave nothing behind in any process; /debug/resources is asked, as operators do."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Any, Final, Self

import httpx2
import pytest

from loraplex.client import AsyncClient, Gatherer, Message, Sampling
from tests.e2e.local_cluster import LocalCluster

STREAMS: Final = 200
ROUNDS: Final = 3
HTTP_EVERY: Final = 4  # the others go over gRPC
SETTLE_S: Final = 20.0
LONGEST_S: Final = 1.0  # a stream to be left is left at the latest then, whether it has begun or still waits
TOKENS: Final = 32
LEFT_TOKENS, LEFT_CHOICES = 8000, 2
"""Of a stream that is left. Were they not aborted, they would hold what they hold for far longer than `SETTLE_S`."""
ZERO: Final = {
    "registry": ("streams", "tasks"),
    "router": ("streams", "tasks", "admitted_requests", "worker_requests"),
    "worker-0": (
        "streams", "tasks", "kv_blocks_in_use", "adapter_references", "waiting_requests", "running_requests",
    ),
}  # fmt: skip


class Resources:
    """What the processes of a cluster say they hold."""

    def __init__(self, admin: Mapping[str, str]) -> None:
        self._admin = admin
        self._http = httpx2.AsyncClient(timeout=60)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def read(self) -> dict[str, dict[str, int]]:
        return {name: (await self._http.get(f"{url}/debug/resources")).json() for name, url in self._admin.items()}

    async def until(self, wanted: Callable[[dict[str, dict[str, int]]], bool], within_s: float = SETTLE_S) -> None:
        """Wait until the numbers are as wanted; no process tells when they change."""
        deadline_s = time.monotonic() + within_s
        while not wanted(held := await self.read()):
            assert time.monotonic() < deadline_s, f"after {within_s:g} s there is still: {json.dumps(held, indent=1)}"
            await asyncio.sleep(0.1)


def nothing_held(held: dict[str, dict[str, int]]) -> bool:
    return all(held[name][what] == 0 for name, fields in ZERO.items() for what in fields)


@pytest.fixture
async def resources(cluster: LocalCluster) -> AsyncIterator[Resources]:
    async with Resources(cluster.ready["admin"]) as resources:
        await resources.until(nothing_held)
        yield resources


async def over_grpc(client: AsyncClient, model: str, max_tokens: int, choices: int) -> int:
    gatherer = Gatherer()
    sampling = Sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, n=choices)
    async for event in client.generate(model, messages=[Message("user", "How?")], sampling=sampling, timeout_s=240):
        gatherer.add(event)
    return len(gatherer.completion().choices[0].token_ids)


async def over_http(http: httpx2.AsyncClient, model: str, max_tokens: int, choices: int) -> int:
    """Ask as a chat, or for several choices by several prompts, each a stream of its own at the worker."""
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "How?"}]}
    path = "/v1/chat/completions"
    if choices > 1:
        path, asked = "/v1/completions", {"prompt": ["How?"] * choices}
    body = {
        **asked, "model": model, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    lines: list[str] = []
    async with http.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            lines.append(line)
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert not [line for line in lines if line.startswith("event: error")]
    usage: dict[str, Any] = json.loads(events[-2])["usage"]
    return int(usage["completion_tokens"])


async def storm(client: AsyncClient, http: httpx2.AsyncClient, models: list[str], rng: random.Random) -> int:
    """Ask everything at once and leave a random half at random moments. Returns how many were really cut short."""
    left = set(rng.sample(range(STREAMS), STREAMS // 2))

    def ask(index: int) -> asyncio.Task[int]:
        model, size = rng.choice(models), (LEFT_TOKENS, LEFT_CHOICES) if index in left else (TOKENS, 1)
        over_which = over_grpc(client, model, *size) if index % HTTP_EVERY else over_http(http, model, *size)
        return asyncio.create_task(over_which)

    asked = [ask(index) for index in range(STREAMS)]

    async def leave(task: asyncio.Task[int], after_s: float) -> bool:
        await asyncio.wait({task}, timeout=after_s)
        cut = task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        return cut

    cuts = [asyncio.create_task(leave(asked[index], rng.uniform(0.0, LONGEST_S))) for index in sorted(left)]
    answered = await asyncio.gather(*(asked[index] for index in range(STREAMS) if index not in left))
    assert answered == [TOKENS] * (STREAMS - len(left))
    return sum(await asyncio.gather(*cuts))


async def test_200_streams_of_which_half_are_left_at_random_leave_nothing_behind(
    cluster: LocalCluster, adapters: Mapping[str, object], resources: Resources
) -> None:
    models = ["tiny", *adapters]
    rng = random.Random(20)
    open_files: dict[str, int] = {}
    for number in range(ROUNDS):
        limits = httpx2.Limits(max_connections=STREAMS)
        async with (
            AsyncClient(cluster.ready["router"], cluster.ready["registry"]) as client,
            httpx2.AsyncClient(base_url=cluster.ready["http"], timeout=240, limits=limits) as http,
        ):
            storming = asyncio.create_task(storm(client, http, models, rng))
            if number == 0:  # the numbers can be other than zero: what is asked for is not a constant
                asked = asyncio.create_task(over_grpc(client, "tiny", LEFT_TOKENS, LEFT_CHOICES))
                await resources.until(lambda held: held["worker-0"]["kv_blocks_in_use"] > 0, within_s=60)
                asked.cancel()
                await asyncio.wait([asked])
            num_cut = await storming
            assert num_cut > STREAMS // 4
            await resources.until(nothing_held)
        if number == 0:
            open_files = {name: numbers["open_files"] for name, numbers in (await resources.read()).items()}
    await resources.until(lambda held: all(held[name]["open_files"] <= open_files[name] for name in held))
