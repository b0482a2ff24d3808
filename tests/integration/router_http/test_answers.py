"""Answers that do not stream, with the real `openai` client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.integration.router_fakes import (
    BASE,
    BASE_ID,
    FakeWorker,
    digest,
)

USER: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]


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
        "base_quantization": "none",
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
