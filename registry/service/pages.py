"""Pages of a list: how many entries, and the opaque token that says where the next page starts."""

from __future__ import annotations

import base64
import binascii
from typing import Final

from loraplex.errors import InvalidParameter

_DEFAULT_SIZE: Final = 100
_MAX_SIZE: Final = 1000


def page_size(asked: int) -> int:
    """Return the number of entries of a page; 0 asks for the default. Raises InvalidParameter."""
    if asked > _MAX_SIZE:
        raise InvalidParameter(f"page_size is {asked}; at most {_MAX_SIZE} are given at a time", field="page_size")
    return asked or _DEFAULT_SIZE


def encode_token(kind: str, last: str) -> str:
    """Return the token of the page after the entry called `last` of this kind of list."""
    return base64.urlsafe_b64encode(f"{kind}:{last}".encode()).decode().rstrip("=")


def decode_token(kind: str, token: str) -> str:
    """Return `last` of `encode_token`, "" for no token. Raises InvalidParameter for a token of elsewhere."""
    if not token:
        return ""
    try:
        raw = token.encode("ascii")
        found_kind, colon, last = (
            base64.b64decode(raw + b"=" * (-len(raw) % 4), b"-_", validate=True).decode().partition(":")
        )
    except (UnicodeError, binascii.Error):
        found_kind, colon, last = "", "", ""
    if found_kind != kind or not colon or not last.isprintable() or not last or encode_token(kind, last) != token:
        raise InvalidParameter("page_token is not one that this list gave out; start without one", field="page_token")
    return last
