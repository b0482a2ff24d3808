"""The shapes of OpenAI's answers: chunks of a stream and whole objects, for chat and for completions.

Knows no sockets: takes the worker's deltas and returns bytes. A stream's chunk is joined from prepared pieces, as it
is made for every token.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from loraplex.types.v1 import generation_pb2
from router.http.logprobs import CompletionPositions, chat_positions

_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

DONE = b"data: [DONE]\n\n"
_FINISH_REASONS: Final[Mapping[int, str]] = {
    generation_pb2.FINISH_REASON_STOP: "stop",
    generation_pb2.FINISH_REASON_LENGTH: "length",
}


@dataclass(frozen=True, slots=True)
class Head:
    """What every chunk of an answer repeats. `model` is the name that was asked for."""

    request_id: str
    created_s: int
    model: str
    fingerprint: str
    include_usage: bool
    has_logprobs: bool


@dataclass(slots=True)
class Total:
    """Tokens of all prompts and choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add(self, usage: generation_pb2.Usage) -> None:
        """Add one prompt's."""
        self.prompt_tokens += usage.prompt_tokens
        self.completion_tokens += usage.completion_tokens
        self.cached_tokens += usage.cached_tokens

    def object(self) -> dict[str, Any]:
        """Return OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Answer(ABC):
    """Forms one request's answer. A subclass knows its endpoint's shapes."""

    id_prefix: ClassVar[str]
    chunk_object: ClassVar[str]
    whole_object: ClassVar[str]

    def __init__(self, head: Head) -> None:
        self._head = head
        fields = {
            "id": f"{self.id_prefix}-{head.request_id}",
            "object": self.chunk_object,
            "created": head.created_s,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
        }
        self._fields = fields
        self._before = "data: " + _json(fields)[:-1] + ',"choices":['
        self._after = '],"usage":null' if head.include_usage else "]"

    def _chunk(self, choice: str, extra: str = "") -> bytes:
        return f"{self._before}{choice}{self._after}{extra}}}\n\n".encode()

    @abstractmethod
    def opening(self, index: int) -> bytes:
        """Return what goes before the first chunk of a choice; may be empty."""

    @abstractmethod
    def delta(self, index: int, delta: generation_pb2.Delta) -> bytes:
        """Return the chunk of new text."""

    @abstractmethod
    def finish(self, index: int, reason: str, facts: Mapping[str, Any] | None) -> bytes:
        """Return the chunk that ends a choice."""

    @abstractmethod
    def choice(
        self, index: int, text: str, positions: list[generation_pb2.PositionLogprobs], reason: str
    ) -> dict[str, Any]:
        """Return a whole choice."""

    def usage(self, total: Total, facts: Mapping[str, Any]) -> bytes:
        """Return the chunk without choices that tells the usage."""
        return f'{self._before}],"usage":{_json(total.object())},"loraplex":{_json(facts)}}}\n\n'.encode()

    def whole(self, choices: list[dict[str, Any]], total: Total, facts: Mapping[str, Any]) -> bytes:
        """Return the answer of a request that does not stream."""
        fields = self._fields | {
            "object": self.whole_object,
            "choices": choices,
            "usage": total.object(),
            "loraplex": facts,
        }
        return _json(fields).encode()


def _extra(facts: Mapping[str, Any] | None) -> str:
    return "" if facts is None else f',"loraplex":{_json(facts)}'


class ChatAnswer(Answer):
    """Answers of /v1/chat/completions."""

    id_prefix = "chatcmpl"
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def opening(self, index: int) -> bytes:
        """Return the chunk that says who speaks."""
        delta = '{"role":"assistant","content":"","refusal":null}'
        return self._chunk(f'{{"index":{index},"delta":{delta},"logprobs":null,"finish_reason":null}}')

    def delta(self, index: int, delta: generation_pb2.Delta) -> bytes:
        """Return the chunk of new text."""
        logprobs = "null"
        if self._head.has_logprobs:
            logprobs = _json({"content": chat_positions(delta.logprobs), "refusal": None})
        content = f'{{"content":{_json(delta.text)}}}'
        return self._chunk(f'{{"index":{index},"delta":{content},"logprobs":{logprobs},"finish_reason":null}}')

    def finish(self, index: int, reason: str, facts: Mapping[str, Any] | None) -> bytes:
        """Return the chunk that ends a choice."""
        return self._chunk(
            f'{{"index":{index},"delta":{{}},"logprobs":null,"finish_reason":"{reason}"}}', _extra(facts)
        )

    def choice(
        self, index: int, text: str, positions: list[generation_pb2.PositionLogprobs], reason: str
    ) -> dict[str, Any]:
        """Return a whole choice."""
        logprobs = {"content": chat_positions(positions), "refusal": None} if self._head.has_logprobs else None
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}


class CompletionAnswer(Answer):
    """Answers of /v1/completions."""

    id_prefix = "cmpl"
    chunk_object = "text_completion"
    whole_object = "text_completion"

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        self._positions: dict[int, CompletionPositions] = {}

    def opening(self, index: int) -> bytes:  # noqa: ARG002 - chat needs it
        """Return nothing: a completion starts with its text."""
        return b""

    def delta(self, index: int, delta: generation_pb2.Delta) -> bytes:
        """Return the chunk of new text."""
        logprobs = "null"
        if self._head.has_logprobs:
            logprobs = _json(self._positions.setdefault(index, CompletionPositions()).add(delta.logprobs))
        return self._chunk(f'{{"index":{index},"text":{_json(delta.text)},"logprobs":{logprobs},"finish_reason":null}}')

    def finish(self, index: int, reason: str, facts: Mapping[str, Any] | None) -> bytes:
        """Return the chunk that ends a choice."""
        return self._chunk(f'{{"index":{index},"text":"","logprobs":null,"finish_reason":"{reason}"}}', _extra(facts))

    def choice(
        self, index: int, text: str, positions: list[generation_pb2.PositionLogprobs], reason: str
    ) -> dict[str, Any]:
        """Return a whole choice."""
        logprobs = CompletionPositions().add(positions) if self._head.has_logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def finish_reason(finished: generation_pb2.ChoiceFinished) -> str:
    """Return OpenAI's word for why a choice ended."""
    return _FINISH_REASONS.get(finished.reason, "stop")
