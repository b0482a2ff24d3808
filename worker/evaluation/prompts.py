"""The built-in prompts: what people ask of chat, support, code, SQL, extraction and lists, and texts to continue.

They are data (`prompts.json`). Whoever changes them raises their version: figures of different versions do not compare.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

_FILE: Final = Path(__file__).with_name("prompts.json")


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts and the version of their set."""

    version: int
    texts: tuple[str, ...]


@cache
def built_in_prompts() -> PromptSet:
    """Return the prompts that every evaluation uses."""
    data = json.loads(_FILE.read_text(encoding="utf-8"))
    return PromptSet(int(data["version"]), tuple(prompt["text"] for prompt in data["prompts"]))
