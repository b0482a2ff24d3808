"""One choice's text: stop strings over token borders, min_tokens, the end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.text.choice import ChoiceText


@pytest.fixture
def tokens(tiny_text):
    def encode(text: str) -> list[int]:
        return list(tiny_text._tokenizer.encode(text, add_special_tokens=False).ids)

    return encode


def test_the_token_that_completes_a_stop_is_the_last_that_counts(tiny_text, tokens):
    choice = ChoiceText(tiny_text.vocabulary, ["xyz"], 0)
    token_ids = tokens("abxyzmore")
    piece = choice.push(token_ids)
    assert (piece.text, piece.stop) == ("ab", "xyz")
    assert piece.num_tokens == len(tokens("abxyz"))


@given(text=st.text("xyz👋 ", max_size=20), size=st.integers(1, 5))
def test_pieces_of_any_size_give_the_same_text(tiny_text, text, size):
    token_ids = tiny_text._tokenizer.encode(text, add_special_tokens=False).ids
    whole = ChoiceText(tiny_text.vocabulary, ["zy", "👋👋"], 0)
    once = whole.push(token_ids)
    expected = (once.text + ("" if once.stop else whole.finish().text), once.stop)

    choice, shown, stop = ChoiceText(tiny_text.vocabulary, ["zy", "👋👋"], 0), "", None
    for at in range(0, len(token_ids), size):
        piece = choice.push(token_ids[at : at + size])
        shown, stop = shown + piece.text, piece.stop
        if stop:
            break
    if not stop:
        shown += choice.finish().text
    assert (shown, stop) == expected


def test_stops_are_not_looked_for_in_the_text_of_the_first_min_tokens(tiny_text, tokens):
    choice = ChoiceText(tiny_text.vocabulary, ["x"], 2)
    piece = choice.push(tokens("xxqx"))
    assert (piece.text, piece.stop, piece.num_tokens) == ("xxq", "x", 4)


def test_a_stop_cannot_begin_in_the_text_of_the_first_min_tokens(tiny_text, tokens):
    choice = ChoiceText(tiny_text.vocabulary, ["xy"], 1)
    piece = choice.push(tokens("xyxy"))
    assert (piece.text, piece.stop) == ("xy", "xy")


def test_the_end_gives_out_what_was_held_back_and_the_rest_of_a_character(tiny_text, tokens):
    choice = ChoiceText(tiny_text.vocabulary, ["stop"], 0)
    assert choice.push(tokens("a sto")).text == "a "
    assert choice.finish().text == "sto"
    choice = ChoiceText(tiny_text.vocabulary, ["stop"], 0)
    choice.push(tokens("é")[:1])
    assert choice.finish().text == "\ufffd"
