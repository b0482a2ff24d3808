"""How an answer was served, as the caller sees it: timed while it streams, told to people or programs afterwards."""

from __future__ import annotations

import time

from rich.markup import escape

from loraplex.cli import output
from loraplex.generation import Completion, Event, TextDelta


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
    if facts.base_quantization != "none":
        adapter += f" on an {facts.base_quantization} base"
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
    spans = {"spans": completion.spans} if completion.spans else {}
    return {
        "model": model,
        "choices": completion.choices,
        "usage": completion.usage,
        "facts": completion.facts,
        "time_to_first_token_s": round(watch.time_to_first_token_s, 6),
        "tokens_per_second": round(watch.tokens_per_second, 3),
        **spans,
    }
