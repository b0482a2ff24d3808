"""Pages of a sorted list: how many entries, and the opaque token that names the last key seen.

A page starts after a key, not at a number, so it is right whatever came or went meanwhile. `page_of` is for lists in
memory; a list in SQL asks for the key of `decode_token` itself.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from loraplex.errors import InvalidParameter

DEFAULT_SIZE: Final = 100
MAX_SIZE: Final = 1000

T = TypeVar("T")


def page_size(asked: int) -> int:
    """Return the number of entries of a page; 0 asks for the default. Raises InvalidParameter for too many."""
    if asked > MAX_SIZE:
        raise InvalidParameter(f"page_size is {asked}; at most {MAX_SIZE} are given at a time", field="page_size")
    return asked or DEFAULT_SIZE


def encode_token(kind: str, last: str) -> str:
    """Return the token of the page after the entry whose key is `last`, not empty, in this kind of list."""
    return base64.urlsafe_b64encode(f"{kind}:{last}".encode()).decode().rstrip("=")


def decode_token(kind: str, token: str) -> str:
    """Return `last` of `encode_token`, "" for no token. Raises InvalidParameter for a token of elsewhere."""
    if not token:
        return ""
    try:
        raw = token.encode("ascii")
        found_kind, _, last = (
            base64.b64decode(raw + b"=" * (-len(raw) % 4), b"-_", validate=True).decode().partition(":")
        )
    except (UnicodeError, binascii.Error):
        found_kind, last = "", ""
    if found_kind != kind or not last or "\0" in last or encode_token(kind, last) != token:
        raise InvalidParameter("page_token is not one that this list gave out; start without one", field="page_token")
    return last


def page_of(kind: str, items: Sequence[T], key: Callable[[T], str], asked_size: int, token: str) -> tuple[list[T], str]:
    """Return the page after `token` of items sorted by `key`, and the token of the next page ("" at the end).

    Keys are unique and not empty. Raises InvalidParameter.
    """
    size, after = page_size(asked_size), decode_token(kind, token)
    left = [item for item in items if key(item) > after]
    return left[:size], encode_token(kind, key(left[size - 1])) if len(left) > size else ""
