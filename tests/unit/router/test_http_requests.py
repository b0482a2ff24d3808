"""OpenAI requests in, router requests out: whatever JSON comes, the answer is a plan or a typed refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from loraplex.errors import InvalidRequest
from router.http.translate import Plan, chat_plan, completion_plan

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5), st.just("\ud800")
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
)
FIELDS = [
    "model", "messages", "prompt", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "max_tokens", "n",
    "max_completion_tokens", "min_tokens", "ignore_eos", "logprobs", "top_logprobs", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "logit_bias", "stream", "stream_options", "user", "tools", "echo",
    "best_of", "suffix", "response_format", "unknown",
]  # fmt: skip
GOOD = {"model": "m", "messages": [{"role": "user", "content": "x"}], "prompt": "x"}
bodies = st.dictionaries(st.sampled_from(FIELDS), values, max_size=4).map(lambda changes: GOOD | changes)
messages = st.lists(
    st.fixed_dictionaries({"role": st.one_of(st.just("user"), values), "content": values}), max_size=2
).map(lambda made: GOOD | {"messages": made})


def outcome(plan: Callable[[dict[str, Any]], Plan], body: dict[str, Any]) -> Plan | InvalidRequest:
    try:
        return plan(body)
    except InvalidRequest as error:
        return error


@given(st.one_of(bodies, messages, st.dictionaries(st.text(max_size=5), values)))
def test_any_body_is_planned_or_refused_by_name(body: dict[str, Any]) -> None:
    for plan in (chat_plan, completion_plan):
        made = outcome(plan, body)
        if isinstance(made, Plan):
            for request in made.requests:
                request.SerializeToString()
        else:
            assert made.field
            assert made.message


def test_none_is_the_same_as_absent() -> None:
    absent = completion_plan({"model": "m", "prompt": "x"})
    null = completion_plan({"model": "m", "prompt": "x"} | dict.fromkeys(FIELDS[3:]))
    assert absent == null


def test_completions_without_max_tokens_get_openais_default_and_chat_gets_none() -> None:
    assert completion_plan(GOOD).requests[0].sampling.max_tokens == 16
    assert completion_plan(GOOD | {"min_tokens": 20}).requests[0].sampling.max_tokens == 20
    assert not chat_plan(GOOD).requests[0].sampling.HasField("max_tokens")
