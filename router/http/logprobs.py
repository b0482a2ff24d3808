"""Log probabilities in the two shapes that OpenAI's endpoints have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from loraplex.types.v1 import generation_pb2


def token_text(token: bytes) -> str:
    """Return a token as text; bytes that are no whole characters are shown in hex behind `bytes:`, as OpenAI does."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _chat_token(token: generation_pb2.TokenLogprob) -> dict[str, Any]:
    return {"token": token_text(token.token), "logprob": token.logprob, "bytes": list(token.token)}


def chat_positions(positions: Iterable[generation_pb2.PositionLogprobs]) -> list[dict[str, Any]]:
    """Return `choices[].logprobs.content` of a chat answer."""
    return [
        {**_chat_token(position.chosen), "top_logprobs": [_chat_token(token) for token in position.top]}
        for position in positions
    ]


class CompletionPositions:
    """Makes `choices[].logprobs` of a completion, whole or piece by piece; keeps the offset in the answer's text."""

    def __init__(self) -> None:
        self._offset = 0

    def add(self, positions: Iterable[generation_pb2.PositionLogprobs]) -> dict[str, list[Any]]:
        """Return the lists for the next positions; offsets are in characters from the answer's start."""
        tokens: list[str] = []
        token_logprobs: list[float] = []
        top_logprobs: list[dict[str, float]] = []
        text_offset: list[int] = []
        for position in positions:
            text = token_text(position.chosen.token)
            tokens.append(text)
            token_logprobs.append(position.chosen.logprob)
            top = {token_text(token.token): token.logprob for token in position.top}
            top_logprobs.append({**top, text: position.chosen.logprob})
            text_offset.append(self._offset)
            self._offset += len(position.chosen.token.decode(errors="ignore"))
        return {
            "tokens": tokens,
            "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": text_offset,
        }
