"""Clients that leave and prompts that fail free all that was asked of workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx2
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from loraplex import errors
from loraplex.worker.v1 import worker_pb2
from tests.integration.router_fakes import (
    FakeWorker,
    RunningRouter,
    babble_forever,
    delta,
    eventually,
    never_answer,
)
from tests.integration.router_http.sse import events_of

USER: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_closes_its_stream_frees_the_worker(
    client: openai.AsyncOpenAI, router: RunningRouter, worker: FakeWorker, stream: bool
) -> None:
    worker.script = babble_forever
    if stream:
        chunks = await client.chat.completions.create(model="sql", messages=USER, stream=True)
        async for _ in chunks:
            break
        await chunks.close()
    else:
        asking = asyncio.ensure_future(client.chat.completions.create(model="sql", messages=USER))
        await worker.until(lambda: worker.in_flight == 1)
        asking.cancel()
    await worker.until(lambda: worker.num_cancelled == 1)
    await eventually(lambda: router.router.inference.in_flight == 0)
    assert 'outcome="cancelled"' in router.router.metrics.render().decode()


async def test_a_client_that_leaves_before_the_first_delta_frees_every_prompt(
    client: openai.AsyncOpenAI, router: RunningRouter, worker: FakeWorker
) -> None:
    worker.script = never_answer
    asking = asyncio.ensure_future(client.completions.create(model="sql", prompt=["a", "b", "c"], stream=True))
    await worker.until(lambda: worker.in_flight == 3)
    asking.cancel()
    await worker.until(lambda: worker.num_cancelled == 3)
    await eventually(lambda: router.router.inference.in_flight == 0)


async def test_one_refused_prompt_cancels_the_others(
    client: openai.AsyncOpenAI, router: RunningRouter, worker: FakeWorker
) -> None:
    async def picky(
        worker: FakeWorker, request: worker_pb2.GenerateRequest
    ) -> AsyncIterator[worker_pb2.GenerateResponse]:
        if request.prompt == "bad":
            raise errors.PromptTooLong("too long", field="prompt")
        async for event in babble_forever(worker, request):
            yield event

    worker.script = picky
    with pytest.raises(openai.BadRequestError):
        await client.completions.create(model="sql", prompt=["good", "bad", "fine"], stream=True)
    await eventually(lambda: worker.in_flight == 0 and router.router.inference.in_flight == 0)


async def test_a_prompt_that_breaks_in_mid_stream_frees_the_others(
    raw: httpx2.AsyncClient, router: RunningRouter, worker: FakeWorker
) -> None:
    async def one_breaks(
        worker: FakeWorker, request: worker_pb2.GenerateRequest
    ) -> AsyncIterator[worker_pb2.GenerateResponse]:
        yield delta("start")
        if request.prompt == "bad":
            await worker.until(lambda: worker.in_flight == 3)
            raise errors.EngineDown("the engine died")
        async for event in babble_forever(worker, request):
            yield event

    worker.script = one_breaks
    body = {"model": "sql", "prompt": ["good", "bad", "fine"], "stream": True}
    response = await raw.post("/v1/completions", json=body)
    assert json.loads(events_of(response.text)[-1])["error"]["code"] == "engine_down"
    await worker.until(lambda: worker.in_flight == 0)
    await eventually(lambda: router.router.inference.in_flight == 0)
