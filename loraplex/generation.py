"""Asking for text and getting it: the values of a generation request and of its event stream.

Knows neither protobuf nor gRPC. A stream is (TextDelta | ChoiceFinished)* Finished.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from loraplex.spans import Span


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; `role` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. None leaves a choice to the server, whose defaults and ranges sampling.proto names."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    logprobs: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    n: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its bytes (maybe a part of a UTF-8 character) and its natural log probability."""

    token_id: int
    token: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The chosen token of a position and the likeliest ones, likeliest first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text of choice `index` since its last delta, and the tokens behind it."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """The end of choice `index`; `reason` is stop or length."""

    index: int
    reason: str
    stop_string: str | None


@dataclass(frozen=True, slots=True)
class Usage:
    """What is charged, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Of the prompt's tokens, those that were not computed anew."""


@dataclass(frozen=True, slots=True)
class ServingFacts:
    """How a request was served. Adapter digests are empty and `tier_hit` is "" where the base answered."""

    base_digest: str
    version_digest: str
    artifact_digest: str
    tier_hit: str
    queue_s: float
    adapter_load_s: float
    prefill_s: float
    decode_s: float
    worker_id: str
    base_quantization: str = "none"
    """How the worker keeps the base's matrices."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The success end of a stream. `spans` tell where its time went, where they were asked for."""

    usage: Usage
    facts: ServingFacts
    spans: tuple[Span, ...] = ()


Event = TextDelta | ChoiceFinished | Finished


@dataclass(frozen=True, slots=True)
class Choice:
    """One whole answer."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_string: str | None
    logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole stream, gathered."""

    choices: tuple[Choice, ...]
    usage: Usage
    facts: ServingFacts
    spans: tuple[Span, ...] = ()

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text


class Gatherer:
    """Builds a Completion from a stream's events while they are also used otherwise."""

    def __init__(self) -> None:
        self._deltas: dict[int, list[TextDelta]] = {}
        self._ends: dict[int, ChoiceFinished] = {}
        self._finished: Finished | None = None

    def add(self, event: Event) -> None:
        """Take the stream's next event."""
        match event:
            case TextDelta():
                self._deltas.setdefault(event.index, []).append(event)
            case ChoiceFinished():
                self._ends[event.index] = event
            case Finished():
                self._finished = event

    def completion(self) -> Completion:
        """Return the whole answer. Raises ValueError where the stream has not ended with Finished."""
        if self._finished is None:
            raise ValueError("the stream has not finished")
        end = self._finished
        return Completion(tuple(self._choice(index) for index in sorted(self._ends)), end.usage, end.facts, end.spans)

    def _choice(self, index: int) -> Choice:
        deltas, end = self._deltas.get(index, []), self._ends[index]
        return Choice(
            index,
            "".join(delta.text for delta in deltas),
            tuple(token for delta in deltas for token in delta.token_ids),
            end.reason,
            end.stop_string,
            tuple(position for delta in deltas for position in delta.logprobs),
        )


def gather(events: Iterable[Event]) -> Completion:
    """Run a stream to its end and return the whole answer."""
    gatherer = Gatherer()
    for event in events:
        gatherer.add(event)
    return gatherer.completion()
