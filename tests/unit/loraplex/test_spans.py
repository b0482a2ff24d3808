from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from loraplex.spans import Span, in_tree_order

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def span(span_id: str, parent: str = "", at_ms: float = 0) -> Span:
    return Span("t" * 32, span_id, parent, "router", f"name {span_id}", BEGAN + timedelta(milliseconds=at_ms), 0.001)


def order(*spans: Span) -> list[tuple[str, tuple[bool, ...]]]:
    return [(placed.span.span_id, placed.branches) for placed in in_tree_order(spans)]


def test_children_stand_below_their_parents_and_siblings_by_their_start() -> None:
    assert order(span("late", "root", 5), span("leaf", "early", 2), span("early", "root", 1), span("root")) == [
        ("root", ()),
        ("early", (True,)),
        ("leaf", (True, False)),
        ("late", (False,)),
    ]


def test_a_span_whose_parent_is_elsewhere_is_a_root() -> None:
    assert order(span("a", "the caller's"), span("b", "a", 1)) == [("a", ()), ("b", (False,))]


def test_nothing_is_nothing() -> None:
    assert order() == []


@given(st.lists(st.sampled_from("abcdef"), max_size=6), st.randoms(use_true_random=False))
def test_every_span_comes_once_whatever_the_ids_say(parents: list[str], random) -> None:
    spans = [span(name, parent, random.random()) for name, parent in zip("abcdef", parents, strict=False)]
    assert sorted(name for name, _ in order(*spans)) == sorted(each.span_id for each in spans)
