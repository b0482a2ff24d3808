"""A closed-loop load on an OpenAI-compatible completions endpoint, and what the clients saw of it.

Every request streams, forces a fixed number of tokens (ignore_eos, min_tokens) and names one of the models in turn;
`concurrency` clients each send the next request when their last one ended.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import aiohttp

_WORDS: Final = (  # noqa: SIM905 - prose is easier to read than a list
    "adapters share one base while tenants keep their own voice and every batch mixes whatever arrives first "
    "so small models answer quickly when memory holds the hot ones and the rest wait for their turn"
).split()


@dataclass(frozen=True, slots=True)
class Work:
    """What to send: `requests` prompts of `prompt_words` random words, `output_tokens` tokens each."""

    models: tuple[str, ...]
    concurrency: int
    requests: int
    prompt_words: int = 64
    output_tokens: int = 64
    seed: int = 0
    """Prompts are made from it, and where tokens are sampled their seeds."""
    temperature: float = 0.0
    top_p: float = 1.0


@dataclass(slots=True)
class Seen:
    """What the clients measured; times in seconds."""

    tokens: int = 0
    deltas: int = 0
    wall_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens of all requests over the wall time of the run."""
        return self.tokens / self.wall_s

    def summary(self) -> dict[str, float | int]:
        """Return the figures as one flat record, times in milliseconds."""
        return {
            "tok_s": round(self.tokens_per_second, 1),
            "ttft_p50_ms": _quantile_ms(self.ttft_s, 0.50),
            "ttft_p99_ms": _quantile_ms(self.ttft_s, 0.99),
            "ttft_max_ms": round(1e3 * max(self.ttft_s, default=0.0), 1),
            "itl_p50_ms": _quantile_ms(self.gaps_s, 0.50),
            "itl_p99_ms": _quantile_ms(self.gaps_s, 0.99),
            "itl_max_ms": round(1e3 * max(self.gaps_s, default=0.0), 1),
            "tok_per_delta": round(self.tokens / max(1, self.deltas), 2),
            "errors": len(self.errors),
        }


def _quantile_ms(values: Sequence[float], q: float) -> float:
    if len(values) < 2:
        return round(1e3 * sum(values), 1)
    return round(1e3 * statistics.quantiles(values, n=100, method="inclusive")[min(98, round(q * 100) - 1)], 1)


async def run(url: str, work: Work, *, seconds: float = float("inf")) -> Seen:
    """Drive `work` against the server at `url` (scheme://host:port) and return what was seen.

    After `seconds` no more requests are begun.
    """
    seen = Seen()
    remaining = iter(range(work.requests))
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=900)) as session:

        async def client() -> None:
            for index in remaining:
                if time.perf_counter() - start > seconds:
                    return
                await _request(session, url, work, index, seen)

        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(work.concurrency):
                group.create_task(client())
        seen.wall_s = time.perf_counter() - start
    return seen


async def _request(session: aiohttp.ClientSession, url: str, work: Work, index: int, seen: Seen) -> None:
    model = work.models[index % len(work.models)]
    seed = work.seed * 1_000_003 + index
    rng = random.Random(seed)
    body = {
        "model": model,
        "prompt": " ".join(rng.choice(_WORDS) for _ in range(work.prompt_words)),
        "max_tokens": work.output_tokens,
        "min_tokens": work.output_tokens,
        "ignore_eos": True,
        "temperature": work.temperature,
        "top_p": work.top_p,
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    last = start = time.perf_counter()
    tokens = deltas = 0
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                seen.errors.append(f"HTTP {response.status}: {(await response.text())[:300]}")
                return
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    seen.errors.append(str(event["error"])[:300])
                    return
                if event.get("usage"):
                    tokens = event["usage"]["completion_tokens"]
                if not event["choices"]:
                    continue
                now = time.perf_counter()
                (seen.gaps_s if deltas else seen.ttft_s).append(now - last)
                last = now
                deltas += 1
    except aiohttp.ClientError as error:  # a server that breaks is a result, told with the others
        seen.errors.append(f"{type(error).__name__} after {time.perf_counter() - start:.1f} s: {error}")
        return
    if tokens != work.output_tokens:
        seen.errors.append(f"{model}: asked for {work.output_tokens} tokens, got {tokens}")
    seen.tokens += tokens
    seen.deltas += deltas


class Seeds:
    """Seeds that no run of this process has had: the prefix cache would answer prompts that were asked before."""

    def __init__(self, first: int) -> None:
        self._next = first * 1_000

    def take(self) -> int:
        """Return the next one."""
        self._next += 1
        return self._next


def count_errors(what: str, seen: Sequence[Seen]) -> int:
    """Return how many requests of some runs failed, and print the first few reasons."""
    errors = [error for one in seen for error in one.errors]
    if errors:
        print(f"{what}: {errors[:3]}", file=sys.stderr)
    return len(errors)


async def wait(event: asyncio.Event, seconds: float) -> None:
    """Wait so long, or until the event."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
