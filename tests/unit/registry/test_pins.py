"""Pins: what the configuration's list says, what operators say, and which of them wins."""

from __future__ import annotations

import pytest

from loraplex.errors import FailedPrecondition, InvalidParameter
from loraplex.pins import PIN_ON_ALL, parse_replicas, replicas_text
from registry.domain import AdapterRecord, VersionRecord, cut_over
from registry.pins import parse_pinned, with_listed_pin, with_pin


def version(digest: str) -> VersionRecord:
    return VersionRecord(digest, f"a-{digest}", "d", "none", 4, 100, ("q_proj",), 2, 14, "F32", 1)


def adapter(pin_replicas: int = 0) -> AdapterRecord:
    return AdapterRecord("default", "sql", "tiny", "v1", (version("v1"),), 1, 1, pin_replicas)


@pytest.mark.parametrize(
    ("text", "pinned"),
    [
        ("", {}),
        ("sql", {"sql": 1}),
        (" sql , json=3,x=all,", {"sql": 1, "json": 3, "x": PIN_ON_ALL}),
    ],
)
def test_the_list_is_names_and_numbers_of_workers(text, pinned):
    assert parse_pinned(text) == pinned


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("SQL", "no adapter name"),
        ("sql=0", "number of workers"),
        ("sql=", "number of workers"),
        ("sql=-1", "number of workers"),
        ("sql=many", "number of workers"),
        ("sql,json,sql=2", "twice"),
        ("=2", "no adapter name"),
    ],
)
def test_a_list_that_is_wrong_says_what_is(text, said):
    with pytest.raises(ValueError, match=said):
        parse_pinned(text)


@pytest.mark.parametrize(("text", "replicas"), [("1", 1), ("12", 12), ("all", PIN_ON_ALL)])
def test_numbers_of_workers_read_and_write(text, replicas):
    assert parse_replicas(text) == replicas
    assert replicas_text(replicas) == text


@pytest.mark.parametrize(
    ("before", "listed", "after"),
    [(0, {}, 0), (0, {"sql": 2}, 2), (0, {"json": 2}, 0), (3, {"sql": 2}, 3), (3, {}, 3)],
)
def test_the_list_pins_what_is_not_pinned_otherwise(before, listed, after):
    assert with_listed_pin(adapter(before), listed).pin_replicas == after


@pytest.mark.parametrize(("before", "asked", "listed"), [(0, 1, {}), (1, PIN_ON_ALL, {"sql": 1}), (2, 0, {"json": 1})])
def test_operators_set_and_unset(before, asked, listed):
    assert with_pin(adapter(before), asked, listed).pin_replicas == asked


def test_what_changes_nothing_is_the_same_record():
    record = adapter(2)
    assert with_pin(record, 2, {}) is record
    assert with_listed_pin(record, {"sql": 5}) is record


def test_what_is_listed_cannot_be_unpinned():
    with pytest.raises(FailedPrecondition, match="pinned_adapters"):
        with_pin(adapter(1), 0, {"sql": 1})


def test_more_than_all_is_no_number_of_workers():
    with pytest.raises(InvalidParameter) as caught:
        with_pin(adapter(), PIN_ON_ALL + 1, {})
    assert caught.value.field == "pin_replicas"


def test_a_pin_stays_when_the_name_gets_another_version():
    assert cut_over(adapter(2), "sql", "tiny", version("v2")).pin_replicas == 2
