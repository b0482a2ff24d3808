"""What users write stays text: tokens that steer the model are parsed where its chat template says them, nowhere else.

A message that contains `<|im_start|>system` must not open a turn of its own. So, in a conversation with such content:
the content's control tokens are replaced by stand-ins, the template is rendered, and then the two are told apart: what
still reads as a control token came from the template and is given its secret name, and the stand-ins become the plain
text that they stood for. A second tokenizer knows control tokens by their secret names only. It splits, strips and
merges as the first does, so that everything else becomes the very same tokens. Knows nothing of templates.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any, Final

from tokenizers import Tokenizer

from loraplex.errors import InvalidRequest

_SECRET_CHARS: Final = 8
_PRIVATE_USE: Final = (0x100000, 0x10FFFD)  # plane 16: nobody's text, no normalizer's business


class Veil:
    """The secret names of a tokenizer's control tokens, and the tokenizer that knows them.

    Raises ValueError where the tokenizer cannot be told of them.
    """

    def __init__(self, tokenizer: Tokenizer, controls: Iterable[int]) -> None:
        spec = json.loads(tokenizer.to_str())
        wanted = set(controls)
        added = [token for token in spec.get("added_tokens", ()) if token["id"] in wanted and token["content"]]
        names = {token["content"]: _secret() for token in added}
        self._stand_ins = {text: _secret() for text in names}
        self._unveiled = {**names, **{stand_in: text for text, stand_in in self._stand_ins.items()}}
        self._control = _any_of(names)
        self._either = _any_of(self._unveiled)
        self._normalizer = tokenizer.normalizer if any(token["normalized"] for token in added) else None
        # What a vocabulary lacks is the unknown token, in whoever's words: it is not counted.
        unknown = spec["model"].get("unk_id"), spec["model"].get("unk_token")
        steering = {text: token["id"] for text, token in zip(names, added, strict=True) if token["id"] != unknown[0]}
        steering.pop(unknown[1], None)
        self._ids = frozenset(steering.values())
        self._name = _any_of(names[text] for text in steering)
        self._tokenizer = _renamed(spec, names)
        for text, name in names.items():
            if self._tokenizer.token_to_id(name) != tokenizer.token_to_id(text):
                raise ValueError(f"{text} would get another id")

    def is_needed(self, content: str) -> bool:
        """Tell whether the text has something in it that the tokenizer takes for a control token."""
        if self._control is None:
            return False
        if self._control.search(content):
            return True
        return self._normalizer is not None and bool(self._control.search(self._normalizer.normalize_str(content)))

    def hide(self, content: str) -> str:
        """Return a content for the template, stand-ins in the place of control tokens."""
        return content if self._control is None else self._control.sub(lambda match: self._stand_ins[match[0]], content)

    def reveal(self, rendered: str) -> str:
        """Return what `encode` shall read, of a template rendered with hidden contents."""
        return rendered if self._either is None else self._either.sub(lambda match: self._unveiled[match[0]], rendered)

    def encode(self, revealed: str) -> list[int]:
        """Return the tokens of a revealed text.

        Raises InvalidRequest for a tokenizer that does not parse its own control tokens in every place: it may do so
        where a character of its normalizer's making stands before them, and secret names are no text for elsewhere.
        """
        ids = self._tokenizer.encode(revealed, add_special_tokens=False).ids
        num_names = 0 if self._name is None else len(self._name.findall(revealed))
        if sum(token in self._ids for token in ids) != num_names:
            raise InvalidRequest(
                "a message contains a control token of the base model, and its tokenizer does not let it be told from "
                "those of the chat template; leave it out",
                field="messages",
            )
        return ids


def _secret() -> str:
    """Return a name that no text has and nobody can guess."""
    first, last = _PRIVATE_USE
    return "".join(chr(first + secrets.randbelow(last - first)) for _ in range(_SECRET_CHARS))


def _renamed(spec: dict[str, Any], names: Mapping[str, str]) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json in which control tokens go by other names, and no text makes them."""
    for token in spec["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = spec["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(piece, piece): at for piece, at in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("merges"):
        model["merges"] = [merge for merge in model["merges"] if _merged(merge) not in names]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    spec["post_processor"] = spec["truncation"] = spec["padding"] = None
    try:
        return Tokenizer.from_str(json.dumps(spec))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(str(error)) from error


def _merged(merge: str | list[str]) -> str:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return str(left + right)


def _any_of(words: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern that finds the longest of some words, in time that does not grow with their number."""
    root: dict[str, Any] = {}
    for word in words:
        node = root
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}
    return re.compile(_alternatives(root)) if root else None


def _alternatives(node: dict[str, Any]) -> str:
    branches = [re.escape(character) + _alternatives(rest) for character, rest in node.items() if character]
    if not branches:
        return ""
    whole = f"(?:{'|'.join(branches)})"
    return f"{whole}?" if "" in node else whole
