"""Regular expressions from strangers, matched in bounded time.

PEFT configs name modules by Python regular expressions, and the registry reads configs from anyone. `re` backtracks:
`(.|.)*x` would hold the interpreter for ever. Here the expression's syntax tree is walked with the *set* of reachable
positions (a bit mask), which has no backtracking. Only regular constructs are known; look-around, back-references and
flags are refused. On what is accepted, `matches` answers as `re.fullmatch` does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from re import _parser as sre_parser  # type: ignore[attr-defined]  # the one parser that knows Python's syntax
from typing import Any, Final

MAX_LENGTH: Final = 2_000
_PLAIN: Final = re.compile(r"[\w.-]+")  # a module's name: nothing in it can backtrack, so `re` itself is safe
_MAX_REPEAT_DEPTH: Final = 8
_REPEATS: Final = ("MAX_REPEAT", "MIN_REPEAT")
_COMPOUND: Final = (*_REPEATS, "BRANCH", "SUBPATTERN")
_ANCHORS: Final = (
    "AT_BEGINNING",
    "AT_BEGINNING_STRING",
    "AT_END",
    "AT_END_STRING",
    "AT_BOUNDARY",
    "AT_NON_BOUNDARY",
)
_CATEGORIES: Final[dict[str, Callable[[str], bool]]] = {
    "CATEGORY_DIGIT": str.isdecimal,
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_WORD": lambda char: char.isalnum() or char == "_",
}


class UnsafePattern(ValueError):
    """The expression is malformed, too large, or not regular."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A checked expression; equal where its text is."""

    text: str
    _tree: Any = field(compare=False, repr=False)
    _plain: re.Pattern[str] | None = field(compare=False, repr=False)

    def matches(self, name: str) -> bool:
        """Tell whether the whole of `name` matches."""
        return _Walk(name).reaches_end(self._tree, 1)

    def matches_suffix(self, name: str) -> bool:
        """Tell whether the whole of `name`, or all that follows one of its dots, matches."""
        if self._plain is not None:
            return self._plain.fullmatch(name) is not None
        starts = 1 | sum(1 << (i + 1) for i, char in enumerate(name) if char == ".")
        return _Walk(name).reaches_end(self._tree, starts)


def is_plain(text: str) -> bool:
    """Tell whether the expression is a mere name, which costs next to nothing to match."""
    return _PLAIN.fullmatch(text) is not None


def compile_pattern(text: str) -> Pattern:
    """Parse an expression. Raises UnsafePattern, saying why."""
    if len(text) > MAX_LENGTH:
        raise UnsafePattern(f"the expression has {len(text)} characters; at most {MAX_LENGTH} are allowed")
    try:
        tree = sre_parser.parse(text)
        if tree.state.flags & ~re.UNICODE:
            raise UnsafePattern("flags such as (?i) are not supported")
        _check(tree, 0)
    except RecursionError as error:
        raise UnsafePattern("the expression is nested too deeply") from error
    except (re.error, OverflowError) as error:
        raise UnsafePattern(f"not a regular expression: {error}") from error
    return Pattern(text, tree, re.compile(rf"(?:.*\.)?{text}") if is_plain(text) else None)


def _check(items: Iterable[tuple[Any, Any]], repeat_depth: int) -> None:
    for op, value in items:
        match str(op):
            case "LITERAL" | "NOT_LITERAL" | "ANY":
                pass
            case "IN":
                _check_class(value)
            case "AT":
                if str(value) not in _ANCHORS:
                    raise UnsafePattern(f"{value} is not supported")
            case "BRANCH":
                for branch in value[1]:
                    _check(branch, repeat_depth)
            case "SUBPATTERN":
                _, add_flags, del_flags, body = value
                if add_flags or del_flags:
                    raise UnsafePattern("flags such as (?i:...) are not supported")
                _check(body, repeat_depth)
            case "MAX_REPEAT" | "MIN_REPEAT":
                if repeat_depth >= _MAX_REPEAT_DEPTH:
                    raise UnsafePattern(f"repetitions are nested more than {_MAX_REPEAT_DEPTH} deep")
                _check(value[2], repeat_depth + 1)
            case other:
                raise UnsafePattern(f"{other.lower()} is not supported: look-around and references are not regular")


def _check_class(members: Iterable[tuple[Any, Any]]) -> None:
    for op, value in members:
        if str(op) == "CATEGORY" and str(value).replace("_NOT_", "_") not in _CATEGORIES:
            raise UnsafePattern(f"{value} is not supported")


def _in_class(members: Sequence[tuple[Any, Any]], char: str) -> bool:
    negate = bool(members) and str(members[0][0]) == "NEGATE"
    for op, value in members[negate:]:
        match str(op):
            case "LITERAL":
                hit = ord(char) == value
            case "RANGE":
                hit = value[0] <= ord(char) <= value[1]
            case _:
                name = str(value)
                hit = _CATEGORIES[name.replace("_NOT_", "_")](char) != ("_NOT_" in name)
        if hit:
            return not negate
    return negate


class _Walk:
    """One text; a bit mask stands for a set of positions 0..len(text)."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._end = 1 << len(text)
        self._images: dict[tuple[int, int], int] = {}  # of (a repeated body, one position), by identity of the body
        self._masks: dict[tuple[str, int], int] = {}

    def reaches_end(self, items: Iterable[tuple[Any, Any]], starts: int) -> bool:
        return bool(self._sequence(items, starts) & self._end)

    def _sequence(self, items: Iterable[tuple[Any, Any]], at: int) -> int:
        for op, value in items:
            if not at:
                break
            at = self._item(str(op), value, at)
        return at

    def _item(self, op: str, value: Any, at: int) -> int:
        if op in _REPEATS:
            return self._repeat(value[0], value[1], value[2], at)
        if op == "BRANCH":
            after = 0
            for branch in value[1]:
                after |= self._sequence(branch, at)
            return after
        if op == "SUBPATTERN":
            return self._sequence(value[3], at)
        if op == "AT":
            return at & self._anchored(str(value))
        return (at & self._consumable(op, value)) << 1

    def _repeat(self, least: int, most: Any, body: Any, at: int) -> int:
        for _ in range(least):
            after = self._image(body, at)
            if after == at:
                break  # the body may match nothing; further rounds change nothing
            at = after
        reached, rounds = at, least
        while at and rounds < int(most):
            at = self._image(body, at) & ~reached
            reached |= at
            rounds += 1
        return reached

    def _image(self, body: Any, at: int) -> int:
        """Return where `body` leads from any of `at`: each position is walked once, however deep repeats are nested."""
        if len(body) == 1 and str(body[0][0]) not in _COMPOUND:
            return self._sequence(body, at)
        after = 0
        while at:
            position = at & -at
            at ^= position
            key = id(body), position
            if key not in self._images:
                self._images[key] = self._sequence(body, position)
            after |= self._images[key]
        return after

    def _consumable(self, op: str, value: Any) -> int:
        key = op, id(value)
        if key not in self._masks:
            self._masks[key] = self._mask(op, value)
        return self._masks[key]

    def _mask(self, op: str, value: Any) -> int:
        mask = 0
        for i, char in enumerate(self._text):
            match op:
                case "LITERAL":
                    hit = ord(char) == value
                case "NOT_LITERAL":
                    hit = ord(char) != value
                case "ANY":
                    hit = char != "\n"
                case _:
                    hit = _in_class(value, char)
            mask |= hit << i
        return mask

    def _anchored(self, anchor: str) -> int:
        text = self._text
        if anchor.startswith("AT_BEGINNING"):
            return 1
        if anchor == "AT_END_STRING":
            return self._end
        if anchor == "AT_END":
            return self._end | (self._end >> 1 if text.endswith("\n") else 0)
        word = _CATEGORIES["CATEGORY_WORD"]
        boundary = 0
        for i in range(len(text) + 1):
            before = i > 0 and word(text[i - 1])
            after = i < len(text) and word(text[i])
            boundary |= (before != after) << i
        return boundary if anchor == "AT_BOUNDARY" else ~boundary & (2 * self._end - 1)
