"""The base model's text side: prompts and conversations in, token ids out.

Loads tokenizer.json and the chat template of a Hugging Face folder; needs no transformers. Long texts are tokenized on
a thread, so that streams go on meanwhile.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from loraplex.errors import EmptyPrompt, InvalidBaseModel, InvalidRequest, PromptTooLong
from worker.text.chat import ChatTemplate, Message, load_chat_template
from worker.text.veil import Veil
from worker.text.vocabulary import Vocabulary, special_ids_of_folder

_INLINE_CHARS: Final = 2_000
"""Texts up to this long are tokenized on the event loop: under a millisecond."""

_COUNTED_CHARS: Final = 200_000
"""Texts up to this long are tokenized although they cannot fit, to tell how long they are."""

_Encode = Callable[[str], list[int]]

_PROBE: Final = "probe"
"""What is said in the last turn of a conversation that shows how a template opens turns."""


class TextModel:
    """Tokenizer, vocabulary and chat template of one base model."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, vocabulary: Vocabulary) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._veil = None if template is None else _veil(tokenizer, template, vocabulary)
        self.vocabulary = vocabulary

    @classmethod
    def load(cls, folder: Path) -> TextModel:
        """Read a base model folder. Raises InvalidBaseModel, naming what is wrong with it."""
        try:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises plain Exception
            raise InvalidBaseModel(f"{folder}/tokenizer.json cannot be read: {error}", field="base") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode("The first text pays for tables that are built when they are needed.")
        try:
            template = load_chat_template(folder)
            vocabulary = Vocabulary(tokenizer, extra_special_ids=special_ids_of_folder(folder))
        except (json.JSONDecodeError, UnicodeDecodeError, TypeError, AttributeError) as error:
            raise InvalidBaseModel(f"{folder}: a configuration file is damaged: {error}", field="base") from error
        return cls(tokenizer, template, vocabulary)

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be encoded."""
        return self._template is not None

    async def encode_prompt(self, text: str, *, limit: int) -> tuple[int, ...]:
        """Return the tokens of a plain prompt, with what the tokenizer itself adds (a beginning-of-sequence token).

        Control tokens in it are parsed: the prompt is all the client's own. Raises EmptyPrompt where there are none,
        PromptTooLong where there are more than `limit`.
        """
        return await self._encode(text, self._prompt_tokens, limit=limit, field="prompt")

    async def encode_chat(self, messages: Sequence[Message], *, limit: int) -> tuple[int, ...]:
        """Return the tokens of a conversation with the opening of the assistant's next turn.

        Control tokens are parsed where the template says them; in a message's content they are plain text. Raises
        InvalidRequest where the base has no chat template or the template refuses the conversation, and PromptTooLong
        where there are more than `limit` tokens.
        """
        if self._template is None:
            raise InvalidRequest(
                "this base model has no chat template; send a plain prompt instead (completions)", field="messages"
            )
        if sum(len(message.content) for message in messages) > _INLINE_CHARS:
            rendered, encode = await asyncio.to_thread(self._render, self._template, messages)
        else:
            rendered, encode = self._render(self._template, messages)
        return await self._encode(rendered, encode, limit=limit, field="messages")

    def _render(self, template: ChatTemplate, messages: Sequence[Message]) -> tuple[str, _Encode]:
        """Return a conversation as text, and what makes tokens of it."""
        veil = self._veil
        if veil is None or not any(veil.is_needed(message.content) for message in messages):
            return template.render(messages), self._tokens
        hidden = [replace(message, content=veil.hide(message.content)) for message in messages]
        return veil.reveal(template.render(hidden)), veil.encode

    def _tokens(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _prompt_tokens(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=True).ids

    async def _encode(self, text: str, encode: _Encode, *, limit: int, field: str) -> tuple[int, ...]:
        at_least = -(-len(text) // self.vocabulary.longest_token_chars)
        if len(text) > _COUNTED_CHARS and at_least > limit:  # hopeless: do not spend seconds to count exactly
            raise too_long(at_least, limit, field, exactly=False)
        token_ids = tuple(await asyncio.to_thread(encode, text) if len(text) > _INLINE_CHARS else encode(text))
        if not token_ids:
            raise EmptyPrompt(f"the {field} give no tokens", field=field)
        if len(token_ids) > limit:
            raise too_long(len(token_ids), limit, field)
        return token_ids


def _veil(tokenizer: Tokenizer, template: ChatTemplate, vocabulary: Vocabulary) -> Veil:
    """Return the veil over the special tokens, and over other added tokens that the template opens turns with.

    Raises InvalidBaseModel where the tokenizer cannot have one: its users could forge each other's turns.
    """
    controls = set(vocabulary.special_ids)
    try:
        turns = template.render([Message("user", "a"), Message("assistant", "b"), Message("user", _PROBE)])
    except InvalidRequest:  # a template that wants other turns; its special tokens are known all the same
        turns = ""
    # Not what opens the answer, such as <think>: that has its place in a message's content.
    controls.update(tokenizer.encode(turns.split(_PROBE)[0], add_special_tokens=False).ids)
    try:
        return Veil(tokenizer, controls)
    except ValueError as error:
        raise InvalidBaseModel(
            f"tokenizer.json does not let control tokens in messages be told from the template's: {error}", field="base"
        ) from error


def too_long(length: int, limit: int, field: str, *, exactly: bool = True) -> PromptTooLong:
    """Return the refusal of a prompt of `length` tokens where `limit` fit."""
    return PromptTooLong(
        f"the prompt has {'' if exactly else 'at least '}{length} tokens; this model takes at most {limit}, "
        "which leaves room for one token of the answer",
        field=field,
        limit=limit,
        length=length,
    )
