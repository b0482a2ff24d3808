from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from loraplex.cli.answers import Stopwatch
from loraplex.cli.demo_prompts import DemoPrompt, read_prompts
from loraplex.cli.demo_stage import Answer, judge
from loraplex.errors import InvalidRequest
from loraplex.generation import Choice, Completion, ServingFacts, Usage
from loraplex.records import Adapter, AdapterRegistration, AdapterVersion

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def answer(model: str, tokens: tuple[int, ...], artifact: str = "") -> Answer:
    facts = ServingFacts("b", artifact and "v", artifact, "", 0.0, 0.0, 0.1, 0.2, "w0")
    return Answer(
        model, Completion((Choice(0, "text", tokens, "stop", None),), Usage(1, len(tokens)), facts), Stopwatch()
    )


def registered(name: str, artifact: str) -> AdapterRegistration:
    version = AdapterVersion("v", artifact, "b", "none", 4, 1, (), 1, 1, "F32", NOW)
    return AdapterRegistration(Adapter("default", name, "base", version, (), NOW, NOW), 1, changed=True)


GOOD = [answer("base", (1, 2)), answer("sql", (3, 4), "aa")]


def test_equal_answers_of_the_right_models_are_good():
    assert judge(GOOD, list(GOOD), [registered("sql", "aa")]) == []


@pytest.mark.parametrize(
    ("mixed", "says"),
    [
        ([answer("base", (1, 9)), GOOD[1]], "answer 1 (base) differs when mixed, from token 2 on"),
        ([GOOD[0], answer("sql", (3,), "aa")], "answer 2 (sql) differs when mixed, from token 2 on"),
        ([answer("base", (1, 2), "aa"), GOOD[1]], "answer 1 (base) came from artifact aa, not from the base"),
        ([GOOD[0], answer("sql", (3, 4))], "answer 2 (sql) came from artifact none, not from aa"),
    ],
)
def test_what_does_not_hold_is_named(mixed, says):
    assert judge(GOOD, mixed, [registered("sql", "aa")]) == [says]


def test_an_empty_answer_is_not_good():
    empty = [answer("base", ())]
    assert judge(empty, empty, []) == ["answer 1 (base) is empty"]


def test_prompts_are_read(tmp_path):
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps([{"model": "base", "prompt": "p", "max_tokens": 5}, {"model": "sql", "prompt": "q"}]))
    assert read_prompts(file, {"sql"}) == [DemoPrompt("base", "p", 5), DemoPrompt("sql", "q", 96)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", "at least one"),
        ("[1]", "entry 0: not an object"),
        ('[{"model": "poet", "prompt": "p"}]', "entry 0: model 'poet' is none of base, sql"),
        ('[{"model": "base", "prompt": ""}]', "entry 0: prompt"),
        ('[{"model": "base", "prompt": "p", "max_tokens": true}]', "entry 0: max_tokens"),
    ],
)
def test_bad_prompts_are_named(tmp_path, text, says):
    file = tmp_path / "prompts.json"
    file.write_text(text)
    with pytest.raises(InvalidRequest, match=says.replace("[", r"\[")) as refused:
        read_prompts(file, {"sql"})
    assert str(file) in refused.value.message


def test_a_missing_prompts_file_is_named(tmp_path):
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_prompts(tmp_path / "absent.json", set())
