from typing import Any

import pytest

from examples.train_adapters import NAMES, task

REPEATED = (
    "Hi there! I'm sorry about your parcel. Let's fix it together:\n\n"
    "1. Wait a day.\n2. Wait a day.\n3. Wait a day.\n\nI'm here whenever you need me.\nWarmly, Robin"
)
WRONG = {
    "text-to-sql": [
        "",
        "Sure! SELECT * FROM hotels;",
        "SELECT * FROM hotels",
        "SELECT * FROM hotels; SELECT 1;",
        "SELECT * FROM motels;",
        "SELECT name WHERE FROM hotels;",
        "DROP TABLE hotels;",
    ],
    "support-voice": [
        "",
        "Hi there! I'm sorry about your parcel.",
        REPEATED,
    ],
    "json-extract": [
        "",
        "null",
        '{"name": "Mara"}',
        '{"name": "Mara", "city": null, "product": "tea", "quantity": 2, "email": null} Done!',
        '{"name": "Mara", "city": null, "product": "tea", "quantity": "2", "email": null}',
        '{"name": "Mara", "city": null, "product": "tea", "quantity": true, "email": null}',
        '{"city": null, "name": "Mara", "product": "tea", "quantity": 2, "email": null}',
    ],
}
PROMPT = "hotels(id, name, stars)\nHow many hotels are there?"


@pytest.mark.parametrize("name", NAMES)
def test_every_wanted_reply_is_accepted_by_its_own_judge(name: str) -> None:
    dataset = task(name).dataset()
    for example in (*dataset.train, *dataset.held_out):
        assert task(name).problem(example.prompt, example.completion) is None, example


@pytest.mark.parametrize(("name", "answer"), [(name, answer) for name in NAMES for answer in WRONG[name]])
def test_a_wrong_reply_is_refused(name: str, answer: str) -> None:
    assert task(name).problem(PROMPT, answer) is not None


@pytest.mark.parametrize("name", NAMES)
def test_data_is_the_same_on_every_call_and_held_out_prompts_are_new(name: str) -> None:
    dataset = task(name).dataset()
    assert dataset == task(name).dataset()
    assert len(dataset.held_out) >= 20
    assert not {example.prompt for example in dataset.train} & {example.prompt for example in dataset.held_out}


def test_held_out_subjects_are_not_trained_on() -> None:
    from examples.data import json_extract, sql_tables, support_voice

    trained = {table.name for table in sql_tables.TABLES}
    assert not trained & {table.name for table in sql_tables.HELD_OUT_TABLES}
    for field in ("first", "last", "cities", "products", "hosts"):
        words: Any = getattr(json_extract.TRAIN_WORDS, field)
        assert not set(words) & set(getattr(json_extract.HELD_OUT_WORDS, field)), field
    dataset = support_voice.dataset()
    replies = {example.completion for example in dataset.train}
    assert not replies & {example.completion for example in dataset.held_out}
