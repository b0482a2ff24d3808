"""What each token of the base model's vocabulary stands for, as bytes.

Reads the decoder of tokenizer.json once and turns it into a rule "token id -> bytes", so that text can be put together
token by token in constant time, exactly, also where a UTF-8 character spans several tokens. Knows the byte-level
decoders (Llama 3, SmolLM2, Qwen, Mistral Nemo) and the SentencePiece ones with byte fallback (Llama 2, Mistral).

A leading space that SentencePiece decoders strip from the start of a text is kept: generated text continues a prompt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from loraplex.errors import InvalidBaseModel

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_table() -> dict[str, int]:
    """Return {character: byte} of byte-level BPE: printable bytes are themselves, the others follow from U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    hidden = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(0x100 + at): byte for at, byte in enumerate(hidden)})
    return table


_BYTE_LEVEL: Final = _byte_level_table()


def _from_byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_LEVEL[character] for character in token])
    except KeyError:  # an added token stands for itself
        return token.encode()


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _steps(inner)]
    return [decoder]


def _decoding_rule(decoder: dict[str, Any] | None) -> Callable[[str], bytes]:
    """Return token -> bytes for a decoder of tokenizer.json. Raises InvalidBaseModel for one that is not known."""
    steps = _steps(decoder)
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds and not {"Replace", "Metaspace", "WordPiece", "BPEDecoder", "CTC"} & set(kinds):
        return _from_byte_level
    replacements: list[tuple[str, str]] = []
    byte_fallback = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
                replacements.append((pattern, content))
            case {"type": "Metaspace", "replacement": str(replacement)}:
                replacements.append((replacement, " "))
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"} | {"type": "Strip"}:
                pass
            case _:
                replacements.clear()
                break
    if not replacements:
        raise InvalidBaseModel(
            f"tokenizer.json has a decoder that is not supported ({' + '.join(kinds) or 'none'}); supported are "
            "byte-level BPE and SentencePiece with byte fallback, as the Llama family uses them",
            field="base",
        )

    def from_pieces(token: str) -> bytes:
        if byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for pattern, content in replacements:
            token = token.replace(pattern, content)
        return token.encode()

    return from_pieces


class Vocabulary:
    """Token ids and the bytes behind them. Immutable but for a memo; used from the event loop only."""

    def __init__(self, tokenizer: Tokenizer, *, extra_special_ids: Iterable[int] = ()) -> None:
        spec = json.loads(tokenizer.to_str())
        self._tokenizer = tokenizer
        self._rule = _decoding_rule(spec.get("decoder"))
        self._special_ids = frozenset(
            {int(token["id"]) for token in spec.get("added_tokens", ()) if token["special"]} | set(extra_special_ids)
        )
        self._memo: dict[int, bytes] = {}
        self.longest_token_chars = max((len(token) for token in tokenizer.get_vocab(with_added_tokens=True)), default=1)
        """No token stands for more characters of text than this."""

    def is_special(self, token_id: int) -> bool:
        """Tell whether the token steers the model and never is text (end of sequence, turn markers, padding)."""
        return token_id in self._special_ids

    @property
    def special_ids(self) -> frozenset[int]:
        """The tokens that steer the model and never are text."""
        return self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes the token stands for, special or not; none for an id without a token."""
        known = self._memo.get(token_id)
        if known is None:
            token = self._tokenizer.id_to_token(token_id)
            known = self._memo[token_id] = b"" if token is None else self._rule(token)
        return known


def special_ids_of_folder(folder: Path) -> set[int]:
    """Return the end-of-sequence ids that config.json and generation_config.json of a base model folder name."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        file = folder / name
        if not file.exists():
            continue
        value = json.loads(file.read_text()).get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return found
