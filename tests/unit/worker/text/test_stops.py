"""Stop strings: the text ends where it should, however it was cut into pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from worker.text.stops import StopFinder

ALPHABET = "abc "
TEXTS = st.text(ALPHABET, max_size=40)
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=4)


def cut_plainly(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition, by brute force: the first end of any stop string; of those the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: list[str]) -> tuple[str, str | None, list[str]]:
    finder = StopFinder(stops)
    shown: list[str] = []
    for piece in pieces:
        cut = finder.push(piece)
        shown.append(cut.text)
        if cut.stop is not None:
            return "".join(shown), cut.stop, shown
    shown.append(finder.flush())
    return "".join(shown), None, shown


def split(text: str, borders: list[int]) -> list[str]:
    at = sorted({0, len(text), *(border % (len(text) + 1) for border in borders)})
    return [text[a:b] for a, b in pairwise(at)]


@given(TEXTS, STOPS, st.lists(st.integers(0, 100), max_size=10))
@example("aab", ["aab", "ab"], [1, 2])
@example("abcd", ["bcd", "c"], [1, 2, 3])
@example("aaab", ["aab"], [1, 2, 3])
def test_the_text_is_the_untruncated_text_cut_at_the_first_stop_for_any_split(text, stops, borders):
    shown, stop, _ = run(split(text, borders), stops)
    assert (shown, stop) == cut_plainly(text, stops)


@given(TEXTS, STOPS, st.lists(st.integers(0, 100), max_size=10))
def test_what_was_shown_is_never_taken_back(text, stops, borders):
    whole, _ = cut_plainly(text, stops)
    pieces = split(text, borders)
    finder = StopFinder(stops)
    shown = ""
    for piece in pieces:
        cut = finder.push(piece)
        shown += cut.text
        assert whole.startswith(shown)
        if cut.stop is not None:
            return


def test_only_what_may_be_the_beginning_of_a_stop_is_held_back():
    finder = StopFinder(["\n\nUser:"])
    assert finder.push("Hello\n").text == "Hello"
    assert finder.push("\nUse").text == ""
    assert finder.push("ful").text == "\n\nUseful"


def test_after_a_stop_nothing_more_comes_out():
    finder = StopFinder(["END"])
    cut = finder.push("so END and more")
    assert (cut.text, cut.stop) == ("so ", "END")
    assert finder.push("again").text == ""
    assert finder.flush() == ""


def test_without_stops_everything_comes_out_at_once():
    assert StopFinder([]).push("anything").text == "anything"


def test_an_empty_stop_string_is_a_bug_of_the_caller():
    with pytest.raises(ValueError, match="empty"):
        StopFinder([""])
