"""A worker's refusals of what a router's HTTP front let through name the fields that the client sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from loraplex.errors import BaseMismatch, LoraplexError, PromptTooLong, ResourceExhausted, VersionMismatch
from loraplex.worker.v1 import worker_pb2
from router.http.names import FieldNames
from router.http.translate import Plan, chat_plan, completion_plan
from worker.requests import check_request

BASE = "b" * 64
VOCAB = 100
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
TEXT = {"model": "m", "prompt": "x"}


def refusal(plan: Plan) -> LoraplexError:
    """Return what a worker says to the first prompt that it refuses, in the client's words."""
    for number, request in enumerate(plan.requests):
        asked = worker_pb2.GenerateRequest(base_digest=BASE, sampling=request.sampling)
        match request.WhichOneof("input"):
            case "tokens":
                asked.tokens.CopyFrom(request.tokens)
            case "chat":
                asked.chat.CopyFrom(request.chat)
            case _:
                asked.prompt = request.prompt
        try:
            check_request(asked, base_digest=BASE, vocab_size=VOCAB)
        except LoraplexError as error:
            return plan.names.told(error, number)
    raise AssertionError("the worker takes it")


@pytest.mark.parametrize(
    ("plan", "body", "field", "words"),
    [
        (completion_plan, TEXT | {"prompt": [1, 100]}, "prompt[1]", "prompt[1] is 100"),
        (completion_plan, TEXT | {"prompt": [[1], [2, 3, 4000]]}, "prompt[1][2]", "prompt[1][2] is 4000"),
        (completion_plan, TEXT | {"logit_bias": {"100": 1}}, "logit_bias[100]", "logit_bias[100]: there is no"),
        (completion_plan, TEXT | {"min_tokens": 9, "max_tokens": 8}, "min_tokens", "larger than max_tokens 8"),
        (chat_plan, CHAT | {"min_tokens": 9, "max_tokens": 8}, "min_tokens", "larger than max_tokens 8"),
        (
            chat_plan,
            CHAT | {"min_tokens": 9, "max_completion_tokens": 8},
            "min_tokens",
            "larger than max_completion_tokens 8; give at most max_completion_tokens",
        ),
        (chat_plan, CHAT | {"logit_bias": {"100": 1}}, "logit_bias[100]", "logit_bias[100]: there is no"),
    ],
)
def test_what_only_a_worker_can_know_is_told_by_the_clients_names(
    plan: Callable[[dict[str, Any]], Plan], body: dict[str, Any], field: str, words: str
) -> None:
    error = refusal(plan(body))
    assert error.field == field
    assert words in error.message
    assert "token_ids" not in error.message


@pytest.mark.parametrize(
    ("field", "message", "told", "words"),
    [
        ("logprobs", "logprobs is 30; give 0 to 20", "top_logprobs", "top_logprobs is 30; give 0 to 20"),
        ("max_tokens", "max_tokens is 0", "max_completion_tokens", "max_completion_tokens is 0"),
        ("stop[0]", "stop[0] has 0 characters", "stop", "stop[0] has 0 characters"),
        ("messages[0].role", "messages[0].role is 'x'", "messages[0].role", "messages[0].role is 'x'"),
        ("temperature", "temperature value 9", "temperature", "temperature value 9"),
        ("x-loraplex-min-revision", "must be a number", "x-loraplex-min-revision", "must be a number"),
        ("adapter.format", "cannot read", None, "cannot read"),
        ("base_digest", "another base", None, "another base"),
        ("", "nothing", None, "nothing"),
    ],
)
def test_every_field_is_the_clients_or_none(field: str, message: str, told: str | None, words: str) -> None:
    plan = chat_plan(CHAT | {"logprobs": True, "top_logprobs": 3, "max_completion_tokens": 5, "stop": "END"})
    error = plan.names.told(LoraplexError(message, field=field))
    assert (error.field, error.message) == (told, words)


def test_an_error_keeps_its_class_its_facts_and_its_patience() -> None:
    names = FieldNames(("prompt[0]", "prompt[1]"), {})
    error = names.told(PromptTooLong("too long", field="token_ids", limit=5, length=9), 1)
    assert type(error) is PromptTooLong
    assert error.metadata == {"field": "prompt[1]", "limit": "5", "length": "9"}
    assert names.told(PromptTooLong("too long", field="prompt", limit=5, length=9), 0).field == "prompt[0]"
    assert names.told(PromptTooLong("too long", field="prompt", limit=5, length=9)).field == "prompt"
    full = ResourceExhausted("ask for fewer logprobs", retry_after_s=2.0)
    assert names.told(full) is full
    assert chat_plan(CHAT).names.told(full).retry_after_s == 2.0
    for mismatch in (VersionMismatch("other", field="adapter.version_digest"), BaseMismatch("x", field="base_digest")):
        assert type(names.told(mismatch)) is type(mismatch)
        assert names.told(mismatch).field is None


def test_a_list_of_stops_and_of_prompts_names_its_entries() -> None:
    plan = completion_plan(TEXT | {"prompt": ["a", "b"], "stop": ["x"]})
    assert plan.names.told(LoraplexError("stop[0] is", field="stop[0]")).field == "stop[0]"
    assert plan.names.prompts == ("prompt[0]", "prompt[1]")
