"""Pages cover a list once, whatever their size and whatever comes or goes meanwhile."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.errors import InvalidParameter
from router.pages import DEFAULT_PAGE, MAX_PAGE, page_of


def key(item: str) -> tuple[str, str]:
    return item, ""


@given(st.sets(st.text(max_size=5), max_size=30), st.integers(1, 40))
def test_pages_cover_everything_once(items: set[str], size: int) -> None:
    ordered, seen, token = sorted(items), list[str](), ""
    while True:
        page, token = page_of(ordered, key, size, token)
        assert len(page) <= size
        seen += page
        if not token:
            break
    assert seen == ordered


def test_an_item_that_goes_between_pages_hides_no_other() -> None:
    _, token = page_of(["a", "b", "c", "d"], key, 2, "")
    assert page_of(["a", "c", "d"], key, 2, token) == (["c", "d"], "")


def test_sizes_have_a_default_and_a_limit() -> None:
    items = [f"{i:05}" for i in range(3000)]
    assert len(page_of(items, key, 0, "")[0]) == DEFAULT_PAGE
    assert len(page_of(items, key, 5000, "")[0]) == MAX_PAGE


@pytest.mark.parametrize("token", ["x", "W10=", "e30=", "WzEsMl0=", "é", "!!!"])
def test_foreign_tokens_are_refused(token: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        page_of(["a"], key, 1, token)
    assert caught.value.field == "page_token"
