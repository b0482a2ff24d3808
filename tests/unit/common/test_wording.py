"""Values in messages stay short."""

from __future__ import annotations

from common.wording import listing, shown


def test_listings_of_many_names_stay_short():
    assert listing(["b", "a"]) == "a, b"
    assert listing([f"{i:02}" for i in range(12)]) == "00, 01, 02, 03, 04, 05, 06, 07, 08, 09 and 2 more"


def test_values_are_quoted_and_cut():
    assert shown('a"\x1b') == '"a\\"\\u001b"'
    assert len(shown("x" * 1000)) == 80
