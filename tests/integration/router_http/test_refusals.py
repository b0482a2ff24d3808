"""What the OpenAI-compatible front refuses, and how; probes and metrics."""

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
from loraplex.worker.v1 import worker_pb2
from tests.integration.router_fakes import (
    BASE_ID,
    FakeRegistry,
    FakeWorker,
    RunningRouter,
    adapter_entry,
    babble_forever,
    never_answer,
    raising,
    running_router,
)

USER: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]


def events_of(text: str) -> list[str]:
    """Return the data of each server-sent event."""
    return [
        line.removeprefix("data: ")
        for block in text.split("\n\n")
        for line in block.split("\n")
        if line.startswith("data")
    ]


CHAT = {"model": "sql", "messages": USER}
COMPLETION = {"model": "sql", "prompt": "x"}
BASE_COMPLETION = COMPLETION | {"model": BASE_ID}


BAD: list[tuple[str, dict[str, Any], int, str]] = [
    ("chat/completions", {"messages": USER}, 400, "model"),
    ("chat/completions", {"model": "sql"}, 400, "messages"),
    ("chat/completions", {"model": "sql", "messages": []}, 400, "messages"),
    ("chat/completions", {"model": "sql", "messages": "Hi"}, 400, "messages"),
    ("chat/completions", {"model": "sql", "messages": ["Hi"]}, 400, "messages[0]"),
    ("chat/completions", {"model": "sql", "messages": [{"content": "Hi"}]}, 400, "messages[0].role"),
    ("chat/completions", {"model": "sql", "messages": [{"role": "user"}]}, 400, "messages[0].content"),
    ("chat/completions", {"model": "sql", "messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0].role"),
    (
        "chat/completions",
        {"model": "sql", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        400,
        "messages[0].content[0].type",
    ),
    ("chat/completions", {"model": "nobody", "messages": USER}, 404, "model"),
    ("chat/completions", CHAT | {"model": 5}, 400, "model"),
    ("chat/completions", CHAT | {"temperature": "1"}, 400, "temperature"),
    ("chat/completions", CHAT | {"temperature": -1}, 400, "temperature"),
    ("chat/completions", CHAT | {"top_p": 0}, 400, "top_p"),
    ("chat/completions", CHAT | {"n": 0}, 400, "n"),
    ("chat/completions", CHAT | {"n": True}, 400, "n"),
    ("chat/completions", CHAT | {"max_tokens": 0}, 400, "max_tokens"),
    ("chat/completions", CHAT | {"max_tokens": 1.5}, 400, "max_tokens"),
    ("chat/completions", CHAT | {"max_tokens": 1, "max_completion_tokens": 2}, 400, "max_completion_tokens"),
    ("chat/completions", CHAT | {"stop": [1]}, 400, "stop[0]"),
    ("chat/completions", CHAT | {"stop": ["a"] * 17}, 400, "stop"),
    ("chat/completions", CHAT | {"seed": 2**63}, 400, "seed"),
    ("chat/completions", CHAT | {"logit_bias": {"a": 1}}, 400, "logit_bias"),
    ("chat/completions", CHAT | {"logit_bias": {"1": 101}}, 400, "logit_bias"),
    ("chat/completions", CHAT | {"logprobs": 3}, 400, "logprobs"),
    ("chat/completions", CHAT | {"top_logprobs": 3}, 400, "top_logprobs"),
    ("chat/completions", CHAT | {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    ("chat/completions", CHAT | {"stream": "yes"}, 400, "stream"),
    ("chat/completions", CHAT | {"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ("chat/completions", CHAT | {"tools": [{"type": "function"}]}, 400, "tools"),
    ("chat/completions", CHAT | {"tool_choice": "required"}, 400, "tool_choice"),
    ("chat/completions", CHAT | {"functions": [{}]}, 400, "functions"),
    ("chat/completions", CHAT | {"response_format": {"type": "json_object"}}, 400, "response_format"),
    ("chat/completions", CHAT | {"modalities": ["audio"]}, 400, "modalities"),
    ("completions", {"model": "sql"}, 400, "prompt"),
    ("completions", COMPLETION | {"prompt": []}, 400, "prompt"),
    ("completions", COMPLETION | {"prompt": ""}, 400, "prompt"),
    ("completions", COMPLETION | {"prompt": [[]]}, 400, "prompt[0]"),
    ("completions", COMPLETION | {"prompt": [1, -1]}, 400, "prompt[1]"),
    ("completions", COMPLETION | {"prompt": [1, True]}, 400, "prompt[0]"),
    ("completions", COMPLETION | {"prompt": ["a", ""]}, 400, "prompt[1]"),
    ("completions", COMPLETION | {"prompt": [[1], [2.5]]}, 400, "prompt[1][0]"),
    ("completions", COMPLETION | {"prompt": ["a", [1]]}, 400, "prompt"),
    ("completions", COMPLETION | {"prompt": {"a": 1}}, 400, "prompt"),
    ("completions", COMPLETION | {"prompt": ["a"] * 129}, 400, "prompt"),
    ("completions", COMPLETION | {"prompt": "\ud800"}, 400, "prompt"),
    ("completions", COMPLETION | {"prompt": ["a", "\ud800"]}, 400, "prompt[1]"),
    ("completions", COMPLETION | {"stop": ["a", "\ud800"]}, 400, "stop[1]"),
    ("completions", COMPLETION | {"logprobs": True}, 400, "logprobs"),
    ("completions", COMPLETION | {"echo": True}, 400, "echo"),
    ("completions", COMPLETION | {"suffix": "x"}, 400, "suffix"),
    ("completions", COMPLETION | {"best_of": 3}, 400, "best_of"),
    ("completions", COMPLETION | {"model": "a" * 5000}, 404, "model"),
]


async def test_bad_input_is_told_by_name(raw: httpx2.AsyncClient, worker: FakeWorker) -> None:
    wrong = []
    for path, body, status, param in BAD:
        response = await raw.post(f"/v1/{path}", content=json.dumps(body))
        error = response.json().get("error", {})
        whole = error.get("message") and error.get("code") and error.get("type") == "invalid_request_error"
        if (response.status_code, error.get("param")) != (status, param) or not whole:
            wrong.append((path, str(body)[:100], response.status_code, error))
        assert response.headers["x-request-id"]
    assert not wrong
    assert not worker.requests


async def test_a_workers_refusal_names_what_the_client_sent(raw: httpx2.AsyncClient, worker: FakeWorker) -> None:
    async def picky(worker: FakeWorker, request: worker_pb2.GenerateRequest) -> AsyncIterator[Any]:
        if 9 in request.tokens.token_ids:
            raise errors.InvalidParameter("token_ids[1] is 9; the vocabulary has ids 0 to 8", field="token_ids[1]")
        async for event in babble_forever(worker, request):
            yield event

    worker.script = picky
    for prompt, param in (([1, 9], "prompt[1]"), ([[1, 2], [3, 9]], "prompt[1][1]")):
        for stream in (False, True):
            response = await raw.post("/v1/completions", json=COMPLETION | {"prompt": prompt, "stream": stream})
            told = response.json()["error"]
            assert (response.status_code, told["param"]) == (400, param)
            assert told["message"] == f"{param} is 9; the vocabulary has ids 0 to 8"
    worker.script = raising(errors.BaseMismatch("another base", field="base_digest"))
    response = await raw.post("/v1/completions", json=COMPLETION)
    assert (response.status_code, response.json()["error"]["param"]) == (409, None)


async def test_bodies_that_are_no_json_object_are_refused(raw: httpx2.AsyncClient) -> None:
    huge_integer = b'{"model": ' + b"1" * 5000 + b"}"
    for body in (b"", b"{", b"[]", b'"text"', b"\xff\xfe", b"[" * 100_000, huge_integer, b"null"):
        response = await raw.post("/v1/completions", content=body)
        assert response.status_code == 400, body[:20]
        assert response.json()["error"]["type"] == "invalid_request_error"


async def test_defaults_of_left_out_features_are_tolerated(client: openai.AsyncOpenAI) -> None:
    await client.chat.completions.create(
        model="sql",
        messages=USER,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        extra_body={"functions": None, "modalities": ["text"], "service_tier": "auto", "store": False, "top_k": -1},
    )
    await client.completions.create(model="sql", prompt="x", echo=False, suffix="", n=2, best_of=2)


@pytest.mark.parametrize(
    ("error", "kind", "retry_after"),
    [
        (errors.QueueFull("full", retry_after_s=2.2), openai.RateLimitError, "3"),
        (errors.DeviceFull("pinned adapters take the rest", retry_after_s=1), openai.RateLimitError, "1"),
        (errors.EngineDown("down"), openai.InternalServerError, None),
        (errors.InvalidParameter("bad", field="min_tokens"), openai.BadRequestError, None),
        (errors.BaseMismatch("other base"), openai.ConflictError, None),
        (errors.LoraplexError("inside"), openai.InternalServerError, None),
        (errors.CorruptArtifact("damaged", retry_after_s=4.0), openai.InternalServerError, "4"),
    ],
    ids=lambda value: getattr(value, "reason", None),
)
async def test_a_workers_refusal_has_its_http_status(
    client: openai.AsyncOpenAI,
    worker: FakeWorker,
    error: errors.LoraplexError,
    kind: type[openai.APIStatusError],
    retry_after: str | None,
) -> None:
    worker.script = raising(error)
    with pytest.raises(kind) as caught:
        await client.chat.completions.create(model="sql", messages=USER)
    assert caught.value.response.headers.get("retry-after") == retry_after
    assert caught.value.code == error.reason.lower()
    assert caught.value.type == kind_of(caught.value.status_code)


def kind_of(status: int) -> str:
    return "rate_limit_error" if status == 429 else "server_error" if status >= 500 else "invalid_request_error"


async def test_no_worker_is_503_and_says_why(
    client: openai.AsyncOpenAI, router: RunningRouter, worker: FakeWorker
) -> None:
    await worker.stop()
    await router.until_workers(0)
    with pytest.raises(openai.InternalServerError) as caught:
        await client.chat.completions.create(model="sql", messages=USER)
    assert caught.value.status_code == 503
    assert "reachable" in caught.value.message


async def test_running_out_of_time_is_504(registry: FakeRegistry, worker: FakeWorker) -> None:
    worker.script = never_answer
    async with (
        running_router(registry.address, worker.address, request_timeout_s=0.3) as router,
        httpx2.AsyncClient(base_url=router.url, timeout=30) as raw,
    ):
        response = await raw.post("/v1/completions", json=BASE_COMPLETION)
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline_exceeded"
        worker.script = babble_forever
        router.router.inference.request_timeout_s = 2.5  # the first word comes in time on a machine that stands still
        response = await raw.post("/v1/completions", json=BASE_COMPLETION | {"stream": True})
        assert response.status_code == 200
        assert json.loads(events_of(response.text)[-1])["error"]["code"] == "deadline_exceeded"


async def test_a_body_over_the_limit_is_413(registry: FakeRegistry, worker: FakeWorker) -> None:
    async with (
        running_router(registry.address, worker.address, max_body_bytes=10_000) as router,
        httpx2.AsyncClient(base_url=router.url, timeout=30) as raw,
    ):
        response = await raw.post("/v1/completions", json=COMPLETION | {"prompt": "x" * 2_000_000})
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "too_large"
        assert (await raw.post("/v1/completions", json=COMPLETION | {"prompt": "x" * 9_000})).status_code == 200


async def test_unknown_routes_and_methods_have_the_error_shape(raw: httpx2.AsyncClient) -> None:
    response = await raw.get("/v1/nothing")
    assert (response.status_code, response.json()["error"]["type"]) == (404, "invalid_request_error")
    response = await raw.get("/v1/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"


async def test_reading_ones_own_write_works_over_http(client: openai.AsyncOpenAI, registry: FakeRegistry) -> None:
    async def later() -> None:
        await asyncio.sleep(0.05)
        await registry.commit(adapter_entry("fresh"))

    committing = asyncio.create_task(later())
    answer = await client.completions.create(model="fresh", prompt="x", extra_headers={"x-loraplex-min-revision": "2"})
    assert answer.model == "fresh"
    await committing


async def test_probes_and_metrics(raw: httpx2.AsyncClient, router: RunningRouter) -> None:
    assert (await raw.get("/livez")).status_code == 200
    assert (await raw.get("/readyz")).status_code == 200
    await raw.post("/v1/completions", json=COMPLETION)
    await raw.post("/v1/completions", json={"model": "secret-name", "prompt": "x"})
    metrics = (await raw.get("/metrics")).text
    assert 'loraplex_router_requests_total{front="http",outcome="ok",reason=""} 1.0' in metrics
    assert 'loraplex_router_requests_total{front="http",outcome="error",reason="MODEL_NOT_FOUND"} 1.0' in metrics
    assert 'loraplex_router_tokens_total{kind="completion"} 3.0' in metrics
    assert 'loraplex_router_workers{state="serving"} 1.0' in metrics
    assert "loraplex_router_catalog_revision 1.0" in metrics
    assert "loraplex_router_requests_in_flight 0.0" in metrics
    assert "secret-name" not in metrics
    assert "_created" not in metrics
    assert "sql" not in metrics
