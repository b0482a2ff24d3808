"""Streams, with the real `openai` client and with raw HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx2
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from loraplex import errors
from loraplex.types.v1 import generation_pb2
from loraplex.worker.v1 import worker_pb2
from tests.integration.router_fakes import (
    FakeRegistry,
    FakeWorker,
    choice_finished,
    delta,
    finished,
    raising,
    running_router,
    worker_process,
)
from tests.integration.router_http.sse import drain, events_of

USER: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]


async def test_a_chat_stream_is_role_text_finish_done(raw: httpx2.AsyncClient) -> None:
    response = await raw.post("/v1/chat/completions", json={"model": "sql", "messages": USER, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events_of(response.text)
    assert done == "[DONE]"
    parsed = [json.loads(chunk) for chunk in chunks]
    choices = [chunk["choices"][0] for chunk in parsed]
    assert choices[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert [choice["delta"] for choice in choices[1:-1]] == [
        {"content": "Hello"},
        {"content": " adapter"},
        {"content": "!"},
    ]
    assert choices[-1]["delta"] == {}
    assert [choice["finish_reason"] for choice in choices] == [None] * 4 + ["stop"]
    assert all(choice["logprobs"] is None and choice["index"] == 0 for choice in choices)
    assert {chunk["object"] for chunk in parsed} == {"chat.completion.chunk"}
    assert {chunk["model"] for chunk in parsed} == {"sql"}
    assert len({(chunk["id"], chunk["created"], chunk["system_fingerprint"]) for chunk in parsed}) == 1
    assert not any("usage" in chunk for chunk in parsed)
    assert [chunk.get("loraplex", {}).get("worker_id") for chunk in parsed] == [None] * 4 + ["w1"]


async def test_the_usage_chunk_has_no_choices_and_comes_last(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="sql", messages=USER, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello adapter!"
    assert [bool(chunk.usage) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    last = chunks[-1]
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (5, 3)
    assert last.model_extra is not None
    assert last.model_extra["loraplex"]["worker_id"] == "w1"
    assert chunks[-2].choices[0].finish_reason == "stop"


async def test_a_stream_of_two_prompts_and_two_choices(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(
        model="sql", prompt=["a", "b"], n=2, stream=True, logprobs=0, stream_options={"include_usage": True}
    )
    texts = dict.fromkeys(range(4), "")
    tokens: dict[int, list[str]] = {index: [] for index in range(4)}
    offsets: dict[int, list[int]] = {index: [] for index in range(4)}
    reasons: dict[int, str] = {}
    usage = None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
            if choice.logprobs and choice.logprobs.tokens and choice.logprobs.text_offset:
                tokens[choice.index] += choice.logprobs.tokens
                offsets[choice.index] += choice.logprobs.text_offset
    assert texts == dict.fromkeys(range(4), "Hello adapter!")
    assert reasons == dict.fromkeys(range(4), "stop")
    assert tokens == {index: ["Hello", " adapter", "!"] for index in range(4)}
    assert offsets == {index: [0, 5, 13] for index in range(4)}
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (10, 12)


async def test_a_choice_without_text_still_opens_and_ends(raw: httpx2.AsyncClient, worker: FakeWorker) -> None:
    async def silent(
        worker: FakeWorker, request: worker_pb2.GenerateRequest
    ) -> AsyncIterator[worker_pb2.GenerateResponse]:
        yield delta("", token_ids=[1])  # half a character so far
        yield choice_finished(reason=generation_pb2.FINISH_REASON_LENGTH)
        yield finished(worker, request, 1, 1)

    worker.script = silent
    response = await raw.post("/v1/chat/completions", json={"model": "sql", "messages": USER, "stream": True})
    opening, end, done = events_of(response.text)
    assert json.loads(opening)["choices"][0]["delta"]["role"] == "assistant"
    assert json.loads(end)["choices"][0]["finish_reason"] == "length"
    assert done == "[DONE]"


async def test_text_outside_ascii_survives(client: openai.AsyncOpenAI, worker: FakeWorker) -> None:
    async def speaks(
        worker: FakeWorker, request: worker_pb2.GenerateRequest
    ) -> AsyncIterator[worker_pb2.GenerateResponse]:
        for piece in ('"Grüße"', "\n\n", "日本\u2028", "😀"):
            yield delta(piece)
        yield choice_finished()
        yield finished(worker, request, 1, 4)

    worker.script = speaks
    stream = await client.completions.create(model="sql", prompt="x", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == '"Grüße"\n\n日本\u2028😀'


async def test_nothing_is_sent_before_the_first_delta(
    registry: FakeRegistry, worker: FakeWorker, raw: httpx2.AsyncClient
) -> None:
    worker.accepts.clear()
    worker.script = raising(errors.PromptTooLong("the prompt has 9 tokens, the limit is 8", field="prompt"))
    body = {"model": "sql", "prompt": "x", "stream": True}
    asking = asyncio.create_task(raw.post("/v1/completions", json=body))
    await worker.until(lambda: worker.in_flight == 1)
    worker.accepts.set()
    response = await asking
    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": "the prompt has 9 tokens, the limit is 8",
        "type": "invalid_request_error",
        "param": "prompt",
        "code": "prompt_too_long",
    }


async def test_an_error_in_mid_stream_is_one_event_and_no_done(raw: httpx2.AsyncClient, worker: FakeWorker) -> None:
    worker.script = raising(errors.EngineDown("the engine died"), delta("Hel"))
    response = await raw.post("/v1/completions", json={"model": "sql", "prompt": "x", "stream": True})
    assert response.status_code == 200
    assert response.text.count("event: error") == 1
    text, error = events_of(response.text)
    assert json.loads(text)["choices"][0]["text"] == "Hel"
    assert json.loads(error)["error"]["code"] == "engine_down"


async def test_the_openai_client_raises_on_the_error_event(client: openai.AsyncOpenAI, registry: FakeRegistry) -> None:
    async with (
        worker_process("w9") as (process, address),
        running_router(registry.address, address) as router,
        openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0) as mine,
    ):
        stream = await mine.chat.completions.create(model="sql", messages=USER, stream=True)
        await anext(aiter(stream))
        process.kill()
        with pytest.raises(openai.APIError, match="lost in mid-stream") as caught:
            await drain(stream)
        assert caught.value.code == "worker_lost"
