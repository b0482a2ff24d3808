"""The base model's text side: prompts and conversations in, token ids out.

Loads tokenizer.json and the chat template of a Hugging Face folder; needs no transformers. Long texts are tokenized on
a thread, so that streams go on meanwhile.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from loraplex.errors import EmptyPrompt, InvalidBaseModel, InvalidRequest, PromptTooLong
from worker.text.chat import ChatTemplate, Message, load_chat_template
from worker.text.vocabulary import Vocabulary, special_ids_of_folder

_INLINE_CHARS: Final = 2_000
"""Texts up to this long are tokenized on the event loop: under a millisecond."""

_COUNTED_CHARS: Final = 200_000
"""Texts up to this long are tokenized although they cannot fit, to tell how long they are."""


class TextModel:
    """Tokenizer, vocabulary and chat template of one base model."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, vocabulary: Vocabulary) -> None:
        self._tokenizer = tokenizer
        self._template = template
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

    async def encode_prompt(self, text: str, *, limit: int) -> tuple[int, ...]:
        """Return the tokens of a plain prompt, with what the tokenizer itself adds (a beginning-of-sequence token).

        Raises EmptyPrompt where there are none, PromptTooLong where there are more than `limit`.
        """
        return await self._encode(text, limit=limit, add_special_tokens=True, field="prompt")

    async def encode_chat(self, messages: Sequence[Message], *, limit: int) -> tuple[int, ...]:
        """Return the tokens of a conversation with the opening of the assistant's next turn.

        Raises InvalidRequest where the base has no chat template or the template refuses the conversation, and
        PromptTooLong where there are more than `limit` tokens.
        """
        if self._template is None:
            raise InvalidRequest(
                "this base model has no chat template; send a plain prompt instead (completions)", field="messages"
            )
        if sum(len(message.content) for message in messages) > _INLINE_CHARS:
            rendered = await asyncio.to_thread(self._template.render, messages)
        else:
            rendered = self._template.render(messages)
        return await self._encode(rendered, limit=limit, add_special_tokens=False, field="messages")

    async def _encode(self, text: str, *, limit: int, add_special_tokens: bool, field: str) -> tuple[int, ...]:
        at_least = -(-len(text) // self.vocabulary.longest_token_chars)
        if len(text) > _COUNTED_CHARS and at_least > limit:  # hopeless: do not spend seconds to count exactly
            raise too_long(at_least, limit, field, exactly=False)
        if len(text) > _INLINE_CHARS:
            encoding = await asyncio.to_thread(self._tokenizer.encode, text, add_special_tokens=add_special_tokens)
        else:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        token_ids = tuple(encoding.ids)
        if not token_ids:
            raise EmptyPrompt(f"the {field} give no tokens", field=field)
        if len(token_ids) > limit:
            raise too_long(len(token_ids), limit, field)
        return token_ids


def too_long(length: int, limit: int, field: str, *, exactly: bool = True) -> PromptTooLong:
    """Return the refusal of a prompt of `length` tokens where `limit` fit."""
    return PromptTooLong(
        f"the prompt has {'' if exactly else 'at least '}{length} tokens; this model takes at most {limit}, "
        "which leaves room for one token of the answer",
        field=field,
        limit=limit,
        length=length,
    )
