from __future__ import annotations

import pytest

from loraplex.address import parse_address


@pytest.mark.parametrize(
    ("text", "parsed"),
    [("a:1", ("a", 1)), ("127.0.0.1:50050", ("127.0.0.1", 50050)), ("[::1]:65535", ("[::1]", 65535))],
)
def test_host_and_port_are_told_apart(text, parsed):
    assert parse_address(text) == parsed


@pytest.mark.parametrize("text", ["", "a", ":1", "a:", "a:x", "a:0", "a:65536", "a:¹", "::1:5", "a:1,b:2", "dns:a:1"])
def test_anything_else_is_refused_with_its_text(text):
    with pytest.raises(ValueError, match=r"HOST:PORT|brackets") as caught:
        parse_address(text)
    assert repr(text) in str(caught.value)
