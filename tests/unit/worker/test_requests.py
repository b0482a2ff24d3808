"""Generation requests over the wire: what is refused, and with which words."""

from __future__ import annotations

from typing import Any

import pytest

from loraplex.errors import BaseMismatch, EmptyPrompt, InvalidParameter, InvalidRequest, UnsupportedAdapter
from loraplex.types.v1.generation_pb2 import ChatInput, ChatMessage, TokenInput
from loraplex.worker.v1.worker_pb2 import GenerateRequest, ResolvedAdapter
from worker.requests import CheckedAdapter, Conversation, check_request

BASE = "0" * 64
TRICK: dict[str, Any] = {"artifact_digest": "../x"}
ADAPTER: dict[str, Any] = {"version_digest": "a" * 64, "artifact_digest": "b" * 64, "rank": 4, "format": "none"}


def check(**fields):
    return check_request(
        GenerateRequest(**{"base_digest": BASE, "prompt": "hi", **fields}), base_digest=BASE, vocab_size=300
    )


def test_a_good_request_passes_with_the_default_tenant():
    checked = check(adapter=ResolvedAdapter(**ADAPTER), request_id="r" * 128)
    assert checked.adapter == CheckedAdapter("a" * 64, "b" * 64)
    assert (checked.prompt, checked.tenant) == ("hi", "default")
    assert check().adapter is None


def test_each_kind_of_input_is_taken():
    turn = ChatMessage(role="user", content="")
    assert isinstance(check(chat=ChatInput(messages=[turn])).prompt, Conversation)
    assert check(tokens=TokenInput(token_ids=[0, 299])).prompt == (0, 299)


@pytest.mark.parametrize(
    ("fields", "kind", "field"),
    [
        ({"request_id": "r" * 129}, InvalidRequest, "request_id"),
        ({"tenant": "t" * 129}, InvalidRequest, "tenant"),
        ({"base_digest": "zz"}, InvalidRequest, "base_digest"),
        ({"base_digest": "A" * 64}, InvalidRequest, "base_digest"),
        ({"base_digest": "1" * 64}, BaseMismatch, "base_digest"),
        ({"adapter": ResolvedAdapter()}, InvalidRequest, "adapter.version_digest"),
        ({"adapter": ResolvedAdapter(**{**ADAPTER, **TRICK})}, InvalidRequest, "adapter.artifact_digest"),
        ({"adapter": ResolvedAdapter(**{**ADAPTER, "format": "int2"})}, UnsupportedAdapter, "adapter.format"),
        ({"prompt": ""}, EmptyPrompt, "prompt"),
        ({"prompt": None}, EmptyPrompt, "prompt"),
        ({"prompt": None, "chat": ChatInput()}, EmptyPrompt, "messages"),
        ({"prompt": None, "tokens": TokenInput()}, EmptyPrompt, "token_ids"),
        ({"prompt": None, "tokens": TokenInput(token_ids=[1, 300])}, InvalidParameter, "token_ids[1]"),
        (
            {"prompt": None, "chat": ChatInput(messages=[ChatMessage(role="user"), ChatMessage(role="tool")])},
            InvalidParameter,
            "messages[1].role",
        ),
    ],
)  # fmt: skip
def test_bad_requests_name_the_field(fields, kind, field):
    with pytest.raises(kind) as caught:
        check(**fields)
    assert caught.value.field == field
