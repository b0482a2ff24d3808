"""Chat templates: a conversation as the base model was trained to read it.

Renders the base's Jinja template in a sandbox, with the names and filters that templates of Hugging Face folders
expect. Knows nothing of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from loraplex.errors import InvalidBaseModel, InvalidRequest
from loraplex.manifest import chat_template

_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks what the assistant says in training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own contract

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without the escapes for HTML that jinja2's own filter adds."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


class ChatTemplate:
    """A compiled template and the special tokens it may name. Raises InvalidBaseModel when it does not compile."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise InvalidBaseModel(f"the base model's chat template is broken: {error}", field="base") from error

    def render(self, messages: Sequence[Message]) -> str:
        """Return the prompt that asks the assistant for its next turn.

        Raises InvalidRequest with the template's own words when it refuses the conversation.
        """
        try:
            return self._template.render(
                messages=[{"role": message.role, "content": message.content} for message in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except Exception as error:  # templates of others fail in any way they like
            raise InvalidRequest(
                f"the base model's chat template refuses this conversation: {error}", field="messages"
            ) from error


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """Return the template of a base model folder, or None where it has none."""
    source = chat_template(folder)
    return None if source is None else ChatTemplate(source, special_tokens(folder))


def special_tokens(folder: Path) -> dict[str, str]:
    """Return bos_token, eos_token and the like by name, as special_tokens_map.json and tokenizer_config.json say."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        file = folder / name
        if not file.exists():
            continue
        config = json.loads(file.read_text())
        for key in _SPECIAL_TOKEN_NAMES:
            value = config.get(key)
            if isinstance(value, dict):  # an AddedToken with its options
                value = value.get("content")
            if isinstance(value, str):
                found[key] = value
    return found
