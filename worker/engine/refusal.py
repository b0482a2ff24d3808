"""Requests that cannot run, and the words for it. Reasons are those of `loraplex.errors`, by name only.

What could never run here is told apart from what could, were it not for pinned adapters: that may be tried again.

The front end checks the same before it submits; here the engine defends itself, since one bad row would fail a whole
step for everyone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from worker.engine.config import EngineConfig
from worker.engine.request import Request
from worker.engine.residency import Pinned
from worker.mailbox import AdapterFile, Pin, Submit


class Problem(NamedTuple):
    """Why a request fails: reason, message, metadata and time to wait of an error of loraplex.errors."""

    reason: str
    message: str
    metadata: dict[str, str] = {}  # noqa: RUF012 - a named tuple's default; nobody writes to it
    retry_after_s: float | None = None


RETRY_AFTER_S: Final = 1.0
"""When to ask again for what finds no room; where the router knows another worker, it asks there at once."""
STEP_FAILED: Final = Problem(
    "INTERNAL", "the engine failed while it computed a step of this request; the worker's log says why"
)
NOT_FINITE: Final = Problem(
    "FAILED_PRECONDITION",
    "the model computed NaN or infinity for this request, so there is no answer; the adapter's weights or lora_alpha "
    "are probably too large for the worker's dtype",
)


class Room(NamedTuple):
    """Of the device, what something takes for good."""

    chunks: int = 0
    num_bytes: int = 0
    vocabulary_bytes: int = 0


NONE: Final = Room()


def pinned_bytes(pin: Pin) -> Pinned:
    """Return what an adapter takes that is to be pinned."""
    return Pinned(pin.artifact_bytes, pin.artifact_bytes - pin.outside_bytes, pin.vocabulary_bytes)


def pinned_room(pinned: Mapping[str, Pinned], config: EngineConfig, without: str | None) -> Room:
    """Return what pinned adapters take, of so many bytes by digest, but for the one of digest `without`."""
    if not pinned:
        return NONE
    sizes = [size for digest, size in pinned.items() if digest != without]
    return Room(
        sum([config.chunks_for_adapter(size.arena_bytes) for size in sizes]),
        sum([size.artifact_bytes for size in sizes]),
        sum([size.vocabulary_bytes for size in sizes]),
    )


def capacity_tokens(adapter: AdapterFile | None, config: EngineConfig, pinned: Room = NONE) -> int:
    """Return the tokens that the arena holds for one request, beside its adapter and those pinned."""
    chunks = 0 if adapter is None else config.chunks_for_adapter(adapter.arena_bytes)
    return (config.total_blocks - chunks - pinned.chunks) * config.block_tokens


def max_known_tokens(submit: Submit, config: EngineConfig, pinned: Room = NONE) -> int:
    """Return prompt plus answer at most, in tokens: the answer ends with `max_tokens` or with the context.

    Where the arena is so small that an adapter takes from the context, the context is what it leaves.
    """
    known = min(len(submit.prompt_token_ids) + submit.sampling.max_tokens, config.max_context_tokens)
    return known if submit.adapter is None else min(known, capacity_tokens(submit.adapter, config, pinned) + 1)


def check(submit: Submit, config: EngineConfig, pinned: Room = NONE) -> Problem | None:
    """Return why a request cannot run here, or None. `pinned` is what others' adapters keep."""
    problem = _check(submit, config, pinned)
    if problem is None or pinned == NONE:
        return problem
    never = _check(submit, config, NONE)
    return never or device_full(f"{problem.message}, or try again later: pinned adapters take the rest", problem)


def device_full(message: str, of: Problem | None = None) -> Problem:
    """Return the refusal of what only lacks room now, with the numbers of the problem that it is."""
    numbers = {} if of is None else {key: value for key, value in of.metadata.items() if key != "field"}
    return Problem("DEVICE_FULL", message, numbers, RETRY_AFTER_S)


def _check(submit: Submit, config: EngineConfig, pinned: Room) -> Problem | None:
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
    capacity = capacity_tokens(submit.adapter, config, pinned)
    limit = min(config.max_context_tokens - 1, capacity)
    if length > limit:
        return Problem(
            "PROMPT_TOO_LONG",
            f"the prompt has {length} tokens, at most {limit} fit; shorten it",
            {"field": "prompt", "limit": str(limit), "length": str(length)},
        )
    if max_known_tokens(submit, config, pinned) - 1 > capacity:
        most = capacity - length + 1
        return Problem(
            "INVALID_PARAMETER",
            f"max_tokens {submit.sampling.max_tokens} after a prompt of {length} tokens needs more KV memory than this "
            f"worker has ({capacity} tokens); ask for at most {most}",
            {"field": "max_tokens", "limit": str(most), "length": str(length)},
        )
    return None


def adapter_too_large(file: AdapterFile, config: EngineConfig, pinned: Room = NONE) -> Problem | None:
    """Return the refusal of an adapter that does not fit a device empty but for those pinned, beside one KV block."""
    problem = _too_large(file, config, pinned)
    if problem is None or pinned == NONE:
        return problem
    never = _too_large(file, config, NONE)
    return never or device_full(f"{problem.message}, unpin some, or try again later", problem)


def _too_large(file: AdapterFile, config: EngineConfig, pinned: Room) -> Problem | None:
    beside = " beside those pinned" if pinned.num_bytes else ""
    arena_bytes = max(0, (config.total_blocks - 2 - pinned.chunks) * config.adapter_chunk_bytes)
    bounds = [
        (
            None if config.max_adapter_bytes is None else config.max_adapter_bytes - pinned.num_bytes,
            file.artifact_bytes,
        ),
        (arena_bytes if config.adapter_chunk_bytes else None, file.arena_bytes),
        (
            None if config.max_vocabulary_bytes is None else config.max_vocabulary_bytes - pinned.vocabulary_bytes,
            file.vocabulary_bytes,
        ),
    ]
    whats = ("of adapters on its device", "of adapters in its arena", "of embeddings and heads beside its arena")
    options = ("max_adapter_bytes", "arena_bytes", "max_vocabulary_bytes")
    for (limit, length), what, option in zip(bounds, whats, options, strict=True):
        if limit is not None and length > max(0, limit):
            return Problem(
                "TOO_LARGE",
                f"adapter {file.artifact_digest[:12]} has {length} bytes, this worker keeps at most {limit} bytes "
                f"{what}{beside}; raise {option}",
                {"limit": str(limit), "length": str(length)},
            )
    return None


def pin(order: Pin, pinned: Mapping[str, Pinned], config: EngineConfig, requests: Iterable[Request]) -> Problem | None:
    """Return why an adapter cannot be pinned beside those of so many bytes by digest, or None.

    A slot stays for other adapters, and beside all pinned ones there is room for an adapter as large as the largest of
    them with the longest context, and for each of `requests`.
    """
    digest, size = order.artifact_digest, pinned_bytes(order)
    if pinned.get(digest) == size:
        return None
    wanted = {**pinned, digest: size}
    if len(wanted) >= config.max_resident_adapters:
        return _too_many_pins(len(wanted), "max_resident_adapters", config.max_resident_adapters - 1, "adapters")
    total = pinned_room(wanted, config, None)
    largest = max(each.artifact_bytes for each in wanted.values())
    vocabulary = max(each.vocabulary_bytes for each in wanted.values())
    chunks = config.blocks_for(config.max_context_tokens)
    chunks += max(config.chunks_for_adapter(each.arena_bytes) for each in wanted.values())
    for request in requests:
        needed = config.blocks_for(request.max_known_tokens - 1)
        if request.adapter is not None and request.adapter.artifact_digest not in wanted:
            largest = max(largest, request.adapter.artifact_bytes)
            vocabulary = max(vocabulary, request.adapter.vocabulary_bytes)
            needed += config.chunks_for_adapter(request.adapter.arena_bytes)
        chunks = max(chunks, needed)
    if total.chunks + chunks > config.total_blocks:
        return _too_many_pins(total.chunks, "arena_bytes", max(0, config.total_blocks - chunks), "chunks")
    for limit, num_bytes, other, option in (
        (config.max_adapter_bytes, total.num_bytes, largest, "max_adapter_bytes"),
        (config.max_vocabulary_bytes, total.vocabulary_bytes, vocabulary, "max_vocabulary_bytes"),
    ):
        if limit is not None and num_bytes and num_bytes + other > limit:
            return _too_many_pins(num_bytes, option, max(0, limit - other), "bytes")
    return None


def cannot_start() -> Problem:
    """Return the refusal of a request for which pinned adapters leave no room, though nothing else is in use."""
    return device_full(
        "the adapters that are pinned on this worker leave too little memory for this request; unpin some, raise "
        "arena_bytes, or try again later"
    )


def _too_many_pins(wanted: int, option: str, limit: int, unit: str) -> Problem:
    return Problem(
        "RESOURCE_EXHAUSTED",
        f"with this adapter pinned ones would take {wanted} {unit} of the device, at most {limit} can be pinned, so "
        f"that every request still finds room; unpin others or raise {option}",
        {"limit": str(limit), "length": str(wanted)},
    )
