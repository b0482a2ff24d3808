"""The sampling options of `generate` and `chat`, and what is measured while an answer streams."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.markup import escape

from loraplex.cli import output
from loraplex.generation import Completion, Event, Sampling, TextDelta

_PANEL = "Sampling (ranges and server defaults as in sampling.proto)"


def _option(name: str, text: str, metavar: str) -> typer.models.OptionInfo:
    info: typer.models.OptionInfo = typer.Option(
        name, help=text, metavar=metavar, rich_help_panel=_PANEL, show_default=False
    )
    return info


MaxTokens = Annotated[int | None, _option("--max-tokens", "At most so many tokens. Default: what fits.", "N")]
Temperature = Annotated[float | None, _option("--temperature", "0 takes the likeliest token, up to 2 mixes more.", "X")]
TopP = Annotated[float | None, _option("--top-p", "Keep the likeliest tokens up to this probability.", "X")]
TopK = Annotated[int | None, _option("--top-k", "Keep so many of the likeliest tokens.", "N")]
MinP = Annotated[float | None, _option("--min-p", "Keep tokens at least so likely beside the likeliest.", "X")]
Seed = Annotated[int | None, _option("--seed", "Same seed, same answer.", "N")]
Stop = Annotated[list[str] | None, _option("--stop", "End before this text; may be repeated.", "TEXT")]
MinTokens = Annotated[int | None, _option("--min-tokens", "Do not end before so many tokens.", "N")]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on after the model's end token.", rich_help_panel=_PANEL)
]
RepetitionPenalty = Annotated[float | None, _option("--repetition-penalty", "Above 1: repeat less.", "X")]
PresencePenalty = Annotated[float | None, _option("--presence-penalty", "Above 0: new tokens.", "X")]
FrequencyPenalty = Annotated[float | None, _option("--frequency-penalty", "Above 0: rarer tokens.", "X")]
LogitBias = Annotated[list[str] | None, _option("--logit-bias", "TOKEN_ID=BIAS; may be repeated.", "ID=X")]
Choices = Annotated[int | None, _option("--n", "So many independent answers.", "N")]
Logprobs = Annotated[int | None, _option("--logprobs", "With --json: log probabilities and N alternatives.", "N")]


def parse_logit_bias(entries: list[str]) -> dict[int, float]:
    """Return `["5=-1.5"]` as {5: -1.5}. Raises typer.BadParameter for anything else."""
    bias = {}
    for entry in entries:
        token, _, value = entry.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError as error:
            raise typer.BadParameter(f"--logit-bias {entry!r} is not TOKEN_ID=BIAS, for example 42=-100") from error
    return bias


class Stopwatch:
    """Times an answer as the caller sees it. Starts when made."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()
        self._first_s: float | None = None
        self._last_s = self._start_s
        self._tokens_first = 0
        self._tokens = 0

    def see(self, event: Event) -> None:
        """Take note of an event as it comes."""
        if not isinstance(event, TextDelta) or not event.token_ids:
            return
        self._last_s = time.perf_counter()
        self._tokens += len(event.token_ids)
        if self._first_s is None:
            self._first_s, self._tokens_first = self._last_s, len(event.token_ids)

    @property
    def time_to_first_token_s(self) -> float:
        """From the call to the first delta with a token; the whole time where none came."""
        return (self._first_s if self._first_s is not None else time.perf_counter()) - self._start_s

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first delta per second since it; 0 where there were none."""
        if self._first_s is None or self._last_s <= self._first_s:
            return 0.0
        return (self._tokens - self._tokens_first) / (self._last_s - self._first_s)


def facts_line(completion: Completion, watch: Stopwatch) -> str:
    """Return how an answer was served, for people."""
    facts, usage = completion.facts, completion.usage
    adapter = (
        f"adapter {output.short(facts.artifact_digest)} (version {output.short(facts.version_digest)}, "
        f"from {facts.tier_hit})"
        if facts.artifact_digest
        else f"base {output.short(facts.base_digest)}, no adapter"
    )
    speed = f"{watch.tokens_per_second:.1f} tok/s, " if watch.tokens_per_second else ""
    load = f", load {output.duration(facts.adapter_load_s)}" if facts.artifact_digest else ""
    return (
        f"{adapter} · {usage.prompt_tokens} + {usage.completion_tokens} tokens · {speed}first token after "
        f"{output.duration(watch.time_to_first_token_s)} · queue {output.duration(facts.queue_s)}{load}, "
        f"prefill {output.duration(facts.prefill_s)}, decode {output.duration(facts.decode_s)} · {facts.worker_id}"
    )


def print_stats(completion: Completion, watch: Stopwatch) -> None:
    """Print how an answer was served on stderr."""
    output.stderr().print(escape(facts_line(completion, watch)), style="dim")


def answer_json(model: str, completion: Completion, watch: Stopwatch) -> dict[str, object]:
    """Return an answer as one JSON object."""
    return {
        "model": model,
        "choices": completion.choices,
        "usage": completion.usage,
        "facts": completion.facts,
        "time_to_first_token_s": round(watch.time_to_first_token_s, 6),
        "tokens_per_second": round(watch.tokens_per_second, 3),
    }


def make_sampling(*, logit_bias: list[str] | None = None, stop: list[str] | None = None, **values: object) -> Sampling:
    """Return the options as a value."""
    return Sampling(stop=tuple(stop or ()), logit_bias=parse_logit_bias(logit_bias or []), **values)  # type: ignore[arg-type]
