"""What the client of one HTTP request calls the fields that its errors are about.

Workers name fields as the gRPC API does, of which OpenAI's differ here and there; a list of prompts is one request
there and several here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from loraplex.errors import LoraplexError
from router.http.schema import FIELDS

_PROMPTS: Final = frozenset({"prompt", "token_ids"})
_ROOT: Final = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class FieldNames:
    """The names of one request's fields."""

    prompts: Sequence[str]
    """Of each prompt: `prompt` or `prompt[i]`, or `messages`."""
    renamed: Mapping[str, str]
    """Other fields that go by another name, by the name the workers have for them."""
    has_one_stop: bool = False
    """`stop` came as a string, not as a list."""

    def told(self, error: LoraplexError, prompt: int | None = None) -> LoraplexError:
        """Return a worker's error in the client's words; `prompt` is the number of the prompt it is about.

        An error about something that the client did not send names no field.
        """
        renamed = {**self.renamed, "token_ids": self._prompt(prompt)}
        words = re.compile(rf"(?<![\w.])({'|'.join(renamed)})(?!\w)")
        message = words.sub(lambda match: renamed[match[1]], error.message)
        facts = dict(error.metadata)
        if (field := facts.pop("field", None)) is not None and (name := self._field(field, prompt)) is not None:
            facts["field"] = name
        if message == error.message and facts == error.metadata:
            return error
        return type(error)(message, retry_after_s=error.retry_after_s, **facts)

    def _field(self, field: str, prompt: int | None) -> str | None:
        if field.startswith("x-"):  # a header
            return field
        match = _ROOT.match(field)
        if match is None:
            return None
        root, rest = match[0], field[match.end() :]
        if root in _PROMPTS:
            return self._prompt(prompt) + rest
        if root == "stop" and self.has_one_stop:
            return root
        name = self.renamed.get(root, root)
        return name + rest if name in FIELDS else None

    def _prompt(self, prompt: int | None) -> str:
        if prompt is None:
            return self.prompts[0] if len(self.prompts) == 1 else "prompt"
        return self.prompts[prompt]
