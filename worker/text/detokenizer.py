"""From tokens to text, token by token: never half a UTF-8 character."""

from __future__ import annotations

import codecs
from typing import Final

from worker.text.vocabulary import Vocabulary

_new_utf8_decoder: Final = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one sequence.

    Bytes that can still become a character are held back; bytes that cannot become U+FFFD at once. Special tokens are
    no text and do not disturb a character that spans them.
    """

    __slots__ = ("_utf8", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._utf8 = _new_utf8_decoder("replace")

    def push(self, token_id: int) -> str:
        """Return the whole characters that `token_id` completes; may be empty."""
        if self._vocabulary.is_special(token_id):
            return ""
        return self._utf8.decode(self._vocabulary.token_bytes(token_id))

    def flush(self) -> str:
        """Return U+FFFD where the sequence ends inside a character, else nothing. The detokenizer starts anew."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text
