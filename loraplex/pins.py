"""How many workers keep a pinned adapter, as a number and in words."""

from __future__ import annotations

import re
from typing import Final

PIN_ON_ALL: Final = 2**31 - 1
"""Stands for all workers of the base, however many there are."""

ALL: Final = "all"
_NUMBER: Final = re.compile(r"[1-9][0-9]{0,5}")


def parse_replicas(text: str) -> int:
    """Return how many workers "1" to "999999" or "all" means. Raises ValueError that says what is accepted."""
    if text == ALL:
        return PIN_ON_ALL
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"{text[:80]!r} is no number of workers; give 1, 2, ... or {ALL}")
    return int(text)


def replicas_text(replicas: int) -> str:
    """Return "2" or "all"; empty for 0, which is not pinned."""
    if replicas >= PIN_ON_ALL:
        return ALL
    return str(replicas) if replicas else ""
