"""Requests that can never run, and the words for it. Reasons are those of `loraplex.errors`, by name only.

The front end checks the same before it submits; here the engine defends itself, since one bad row would fail a whole
step for everyone.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from worker.engine.config import EngineConfig
from worker.mailbox import AdapterFile, Submit


class Problem(NamedTuple):
    """Why a request fails: reason, message and metadata of an error of loraplex.errors."""

    reason: str
    message: str
    metadata: dict[str, str] = {}  # noqa: RUF012 - a named tuple's default; nobody writes to it


STEP_FAILED: Final = Problem(
    "INTERNAL", "the engine failed while it computed a step of this request; the worker's log says why"
)
NOT_FINITE: Final = Problem(
    "FAILED_PRECONDITION",
    "the model computed NaN or infinity for this request, so there is no answer; the adapter's weights or lora_alpha "
    "are probably too large for the worker's dtype",
)


def capacity_tokens(adapter: AdapterFile | None, config: EngineConfig) -> int:
    """Return the tokens that the arena holds for one request, beside its adapter."""
    chunks = 0 if adapter is None else config.chunks_for_adapter(adapter.artifact_bytes)
    return (config.total_blocks - chunks) * config.block_tokens


def max_known_tokens(submit: Submit, config: EngineConfig) -> int:
    """Return prompt plus answer at most, in tokens: the answer ends with `max_tokens` or with the context.

    Where the arena is so small that an adapter takes from the context, the context is what it leaves.
    """
    known = min(len(submit.prompt_token_ids) + submit.sampling.max_tokens, config.max_context_tokens)
    return known if submit.adapter is None else min(known, capacity_tokens(submit.adapter, config) + 1)


def check(submit: Submit, config: EngineConfig) -> Problem | None:
    """Return why a request can never run here, or None."""
    prompt = submit.prompt_token_ids
    length = len(prompt)
    if not length:
        return Problem("EMPTY_PROMPT", "the prompt has no tokens; send at least one", {"field": "prompt"})
    if min(prompt) < 0 or max(prompt) >= config.vocab_size:
        bad = next(token for token in prompt if not 0 <= token < config.vocab_size)
        return Problem(
            "INVALID_PARAMETER",
            f"prompt token id {bad} is not in the vocabulary; use ids from 0 to {config.vocab_size - 1}",
            {"field": "tokens"},
        )
    if submit.sampling.max_tokens < 1:
        return Problem(
            "INVALID_PARAMETER",
            f"max_tokens is {submit.sampling.max_tokens}; it must be at least 1",
            {"field": "max_tokens"},
        )
    if not 0 < submit.weight < float("inf"):
        return Problem(
            "INVALID_PARAMETER", f"the tenant's weight is {submit.weight}; it must be above 0", {"field": "weight"}
        )
    capacity = capacity_tokens(submit.adapter, config)
    limit = min(config.max_context_tokens - 1, capacity)
    if length > limit:
        return Problem(
            "PROMPT_TOO_LONG",
            f"the prompt has {length} tokens, at most {limit} fit; shorten it",
            {"field": "prompt", "limit": str(limit), "length": str(length)},
        )
    if max_known_tokens(submit, config) - 1 > capacity:
        most = capacity - length + 1
        return Problem(
            "INVALID_PARAMETER",
            f"max_tokens {submit.sampling.max_tokens} after a prompt of {length} tokens needs more KV memory than this "
            f"worker has ({capacity} tokens); ask for at most {most}",
            {"field": "max_tokens", "limit": str(most), "length": str(length)},
        )
    return None


def adapter_too_large(file: AdapterFile, config: EngineConfig) -> Problem | None:
    """Return the refusal of an adapter that does not fit an otherwise empty device beside one KV block, or None."""
    limit, option = config.max_adapter_bytes, "max_adapter_bytes"
    arena_bytes = (config.total_blocks - 2) * config.adapter_chunk_bytes
    if config.adapter_chunk_bytes and (limit is None or arena_bytes < limit):
        limit, option = max(0, arena_bytes), "arena_bytes"
    if limit is None or file.artifact_bytes <= limit:
        return None
    return Problem(
        "TOO_LARGE",
        f"adapter {file.artifact_digest[:12]} has {file.artifact_bytes} bytes, this worker keeps at most {limit} bytes "
        f"of adapters on its device; raise {option}",
        {"limit": str(limit), "length": str(file.artifact_bytes)},
    )
