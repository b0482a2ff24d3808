"""Pages cover a list once, whatever their size and whatever comes or goes meanwhile."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.pages import DEFAULT_SIZE, MAX_SIZE, decode_token, encode_token, page_of
from loraplex.errors import InvalidParameter

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=5)


def key(item: str) -> str:
    return item


@given(st.sets(NAMES, max_size=30), st.integers(1, 40))
def test_pages_cover_everything_once(items: set[str], size: int) -> None:
    ordered, seen, token = sorted(items), list[str](), ""
    while True:
        page, token = page_of("names", ordered, key, size, token)
        assert len(page) <= size
        seen += page
        if not token:
            break
    assert seen == ordered


def test_an_item_that_goes_between_pages_hides_no_other() -> None:
    _, token = page_of("names", ["a", "b", "c", "d"], key, 2, "")
    assert page_of("names", ["a", "c", "d"], key, 2, token) == (["c", "d"], "")


def test_sizes_have_a_default_and_a_limit() -> None:
    items = [f"{i:05}" for i in range(3000)]
    assert len(page_of("names", items, key, 0, "")[0]) == DEFAULT_SIZE
    assert len(page_of("names", items, key, MAX_SIZE, "")[0]) == MAX_SIZE
    with pytest.raises(InvalidParameter) as caught:
        page_of("names", items, key, MAX_SIZE + 1, "")
    assert caught.value.field == "page_size"


GOOD = encode_token("names", "a")


@pytest.mark.parametrize(
    "token", ["x", "W10=", "e30=", "é", "!!!", f"{GOOD}=", f"{GOOD}x", encode_token("others", "a"), "bmFtZXM6AA"]
)
def test_foreign_tokens_are_refused(token: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        decode_token("names", token)
    assert caught.value.field == "page_token"
