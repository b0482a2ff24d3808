"""The demo's prompts: a JSON list of {"model": "base" or an adapter's name, "prompt", "max_tokens"}."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from loraplex.errors import InvalidRequest

BASE: Final = "base"
_MAX_TOKENS: Final = 96


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """A user message for a model; `model` is "base" or an adapter's name."""

    model: str
    prompt: str
    max_tokens: int


def read_prompts(file: Path, adapters: set[str]) -> list[DemoPrompt]:
    """Read and check the prompts. Raises InvalidRequest, naming the file and the entry."""
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read: {error.strerror}", field="prompts") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InvalidRequest(f"{file} is not JSON: {error}", field="prompts") from error
    if not isinstance(entries, list) or not entries:
        raise InvalidRequest(f"{file} is not a list with at least one prompt", field="prompts")
    return [_prompt(f"{file}, entry {number}", entry, adapters) for number, entry in enumerate(entries)]


def _prompt(where: str, entry: Any, adapters: set[str]) -> DemoPrompt:
    if not isinstance(entry, dict):
        raise InvalidRequest(f"{where}: not an object", field="prompts")
    model, prompt, max_tokens = entry.get("model"), entry.get("prompt"), entry.get("max_tokens", _MAX_TOKENS)
    if not isinstance(model, str) or model not in {BASE, *adapters}:
        known = ", ".join([BASE, *sorted(adapters)])
        raise InvalidRequest(f"{where}: model {model!r} is none of {known}", field="model")
    if not isinstance(prompt, str) or not prompt:
        raise InvalidRequest(f"{where}: prompt is not a text", field="prompt")
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
        raise InvalidRequest(f"{where}: max_tokens is not a positive number", field="max_tokens")
    return DemoPrompt(model, prompt, max_tokens)
