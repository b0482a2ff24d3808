"""Pages of a sorted list: a token names the last key seen, so a page is right whatever came or went meanwhile."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from loraplex.errors import InvalidParameter

DEFAULT_PAGE: Final = 100
MAX_PAGE: Final = 1000

T = TypeVar("T")
Key = tuple[str, str]


def page_of(items: Sequence[T], key: Callable[[T], Key], page_size: int, page_token: str) -> tuple[list[T], str]:
    """Return the page after `page_token` of items sorted by `key`, and the token of the next page ("" at the end).

    Raises InvalidParameter.
    """
    after = _key_of(page_token) if page_token else None
    size = min(page_size or DEFAULT_PAGE, MAX_PAGE)
    left = [item for item in items if after is None or key(item) > after]
    page = left[:size]
    if len(left) <= size:
        return page, ""
    return page, base64.urlsafe_b64encode(json.dumps(key(page[-1])).encode()).decode()


def _key_of(page_token: str) -> Key:
    try:
        match json.loads(base64.urlsafe_b64decode(page_token.encode())):
            case [str(first), str(second)]:
                return first, second
    except (ValueError, binascii.Error):
        pass
    raise InvalidParameter("page_token is not one of this server's; start again without one", field="page_token")
