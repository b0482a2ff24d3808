"""How values are shown in messages for people: short, and quoted so that nothing in them can mislead."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

_MAX_SHOWN: Final = 80
_MAX_LISTED: Final = 10


def shown(value: Any) -> str:
    """Return a value as JSON, cut to 80 characters."""
    text = json.dumps(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def listing(names: Iterable[str]) -> str:
    """Return "a, b, c", sorted; of many the first ten and how many more there are."""
    names = sorted(names)
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more
