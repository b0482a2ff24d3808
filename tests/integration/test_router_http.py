"""The router's OpenAI-compatible front, with the real `openai` client and with raw HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from loraplex import errors
from loraplex.types.v1 import generation_pb2
from loraplex.worker.v1 import worker_pb2
from tests.integration.router_fakes import (
    BASE,
    BASE_ID,
    FakeRegistry,
    FakeWorker,
    RunningRouter,
    adapter_entry,
    babble_forever,
    base_entry,
    choice_finished,
    delta,
    digest,
    eventually,
    finished,
    never_answer,
    raising,
    running_router,
    worker_process,
)

USER: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def registry() -> AsyncIterator[FakeRegistry]:
    fake = await FakeRegistry(base_entry(), adapter_entry("sql")).start()
    yield fake
    await fake.stop()


@pytest.fixture
async def worker() -> AsyncIterator[FakeWorker]:
    fake = await FakeWorker().start()
    yield fake
    await fake.stop()


@pytest.fixture
async def router(registry: FakeRegistry, worker: FakeWorker) -> AsyncIterator[RunningRouter]:
    async with running_router(registry.address, worker.address) as running:
        yield running


@pytest.fixture
async def client(router: RunningRouter) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
async def raw(router: RunningRouter) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=router.url, timeout=10) as made:
        yield made


def events_of(text: str) -> list[str]:
    """Return the data of each server-sent event."""
    return [
        line.removeprefix("data: ")
        for block in text.split("\n\n")
        for line in block.split("\n")
        if line.startswith("data")
    ]


async def drain(events: AsyncIterator[object]) -> None:
    async for _ in events:
        pass


# Answers that do not stream.


async def test_chat_answers_under_the_asked_name(client: openai.AsyncOpenAI, worker: FakeWorker) -> None:
    answer = await client.chat.completions.create(model="sql", messages=USER, seed=7, max_completion_tokens=9)
    assert answer.model == "sql"
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint == "fp_" + digest("artifact sql")[:12]
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == "Hello adapter!"
    assert choice.finish_reason == "stop"
    assert choice.logprobs is None
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 3, 8)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    (request,) = worker.requests
    assert [(turn.role, turn.content) for turn in request.chat.messages] == [("user", "Hi")]
    assert request.sampling.max_tokens == 9
    assert request.sampling.seed == 7


async def test_headers_and_body_tell_who_served(client: openai.AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(
        model="sql", messages=USER, extra_headers={"x-loraplex-request-id": "mine"}
    )
    assert raw.headers["x-request-id"] == "mine"
    assert raw.headers["x-loraplex-base-digest"] == BASE
    assert raw.headers["x-loraplex-version-digest"] == digest("version sql")
    assert raw.headers["x-loraplex-artifact-digest"] == digest("artifact sql")
    assert raw.headers["x-loraplex-worker"] == "w1"
    served = json.loads(raw.text)["loraplex"]
    assert served == {
        "base_digest": BASE,
        "version_digest": digest("version sql"),
        "artifact_digest": digest("artifact sql"),
        "tier_hit": "device",
        "queue_s": 0.003,
        "adapter_load_s": 0.0,
        "prefill_s": 0.0,
        "decode_s": 0.02,
        "worker_id": "w1",
    }


async def test_the_base_has_no_adapter_headers(client: openai.AsyncOpenAI) -> None:
    raw = await client.completions.with_raw_response.create(model=BASE_ID, prompt="x")
    assert "x-loraplex-version-digest" not in raw.headers
    answer = raw.parse()
    assert answer.choices[0].text == "Hello base!"
    assert answer.system_fingerprint == "fp_" + BASE[:12]


async def test_n_choices_come_apart(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="sql", messages=USER, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [choice.message.content for choice in answer.choices] == ["Hello adapter!"] * 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6


async def test_chat_logprobs_have_chats_shape(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="sql", messages=USER, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [token.token for token in logprobs.content] == ["Hello", " adapter", "!"]
    assert logprobs.content[0].bytes == list(b"Hello")
    assert [top.token for top in logprobs.content[0].top_logprobs] == ["Hello", "alt0"]


async def test_chat_logprobs_alone_have_no_alternatives(client: openai.AsyncOpenAI, worker: FakeWorker) -> None:
    answer = await client.chat.completions.create(model="sql", messages=USER, logprobs=True)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert logprobs.content[0].top_logprobs == []
    assert worker.requests[0].sampling.logprobs == 0
    assert worker.requests[0].sampling.HasField("logprobs")


async def test_completion_logprobs_have_completions_shape(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="sql", prompt="x", logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["Hello", " adapter", "!"]
    assert logprobs.text_offset == [0, 5, 13]
    assert logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.top_logprobs == [{"Hello": -0.5}, {" adapter": -0.5}, {"!": -0.5}]


@pytest.mark.parametrize(
    ("prompt", "texts", "tokens"),
    [
        ("one", ["one"], []),
        (["one", "two"], ["one", "two"], []),
        ([1, 2, 3], [], [[1, 2, 3]]),
        ([[1, 2], [3]], [], [[1, 2], [3]]),
    ],
)
async def test_completions_take_every_kind_of_prompt(
    client: openai.AsyncOpenAI, worker: FakeWorker, prompt: Any, texts: list[str], tokens: list[list[int]]
) -> None:
    count = len(texts) + len(tokens)
    answer = await client.completions.create(model="sql", prompt=prompt, n=2)
    assert [choice.index for choice in answer.choices] == list(range(2 * count))
    assert {choice.text for choice in answer.choices} == {"Hello adapter!"}
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5 * count, 6 * count)
    assert sorted(r.prompt for r in worker.requests if r.WhichOneof("input") == "prompt") == sorted(texts)
    assert sorted(list(r.tokens.token_ids) for r in worker.requests if r.WhichOneof("input") == "tokens") == sorted(
        tokens
    )
    assert {r.sampling.max_tokens for r in worker.requests} == {16}
    assert len({r.request_id for r in worker.requests}) == count


async def test_every_sampling_parameter_arrives(client: openai.AsyncOpenAI, worker: FakeWorker) -> None:
    await client.chat.completions.create(
        model="sql",
        messages=USER,
        temperature=0.5,
        top_p=0.25,
        stop=["a", "b"],
        presence_penalty=1.5,
        frequency_penalty=-1.5,
        logit_bias={"3": 2},
        user="someone",
        extra_body={
            "top_k": 4,
            "min_p": 0.125,
            "min_tokens": 2,
            "ignore_eos": True,
            "repetition_penalty": 1.25,
            "unknown_field": {"is": ["tolerated"]},
        },
    )
    sampling = worker.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 4, 0.125)
    assert list(sampling.stop) == ["a", "b"]
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1.5, -1.5, 1.25)
    assert dict(sampling.logit_bias) == {3: 2.0}
    assert (sampling.min_tokens, sampling.ignore_eos) == (2, True)
    assert not sampling.HasField("max_tokens")
    assert not sampling.HasField("logprobs")
    assert not sampling.HasField("n")


async def test_text_parts_and_the_developer_role_are_understood(client: openai.AsyncOpenAI, worker: FakeWorker) -> None:
    await client.chat.completions.create(
        model="sql",
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        ],
    )
    turns = [(turn.role, turn.content) for turn in worker.requests[0].chat.messages]
    assert turns == [("system", "Be brief."), ("user", "one\ntwo")]


async def test_models_are_listed_and_told(client: openai.AsyncOpenAI) -> None:
    models = [model async for model in client.models.list()]
    assert [model.id for model in models] == [BASE_ID, "sql"]
    assert [model.model_extra["parent"] for model in models if model.model_extra] == [None, BASE_ID]
    assert (await client.models.retrieve("sql")).created == 1_700_000_001
    assert (await client.models.retrieve(BASE_ID)).id == BASE_ID
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("nobody")


# Streams.


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


# Leaving clients.


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
