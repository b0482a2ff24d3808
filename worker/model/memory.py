"""How many chunks an arena gets, and the longest context they allow. Pure arithmetic; errors name the option."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from loraplex.errors import InvalidParameter
from worker.kernels.layout import BLOCK_TOKENS
from worker.model.config import ModelConfig

CPU_DEFAULT_BYTES: Final = 2**30
CPU_FRACTION: Final = 0.25
CUDA_FRACTION: Final = 0.8
"""Of the memory that is free once the weights are loaded; the rest is for intermediate results."""


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """The arena's size and the context it allows, in chunks and tokens."""

    num_chunks: int
    max_context_tokens: int


def block_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of one KV block over all layers, keys and values; `itemsize` is an element's."""
    return 2 * config.num_layers * config.kv_size * BLOCK_TOKENS * itemsize


def default_arena_bytes(device_type: str, free_bytes: int) -> int:
    """Return what the arena takes when nobody said: a share of what is free, on a CPU at most 1 GiB."""
    if device_type == "cpu":
        return min(CPU_DEFAULT_BYTES, int(free_bytes * CPU_FRACTION))
    return int(free_bytes * CUDA_FRACTION)


def plan_arena(
    config: ModelConfig,
    *,
    itemsize: int,
    arena_bytes: int,
    max_context_tokens: int | None,
) -> ArenaPlan:
    """Fit as many chunks as there are into `arena_bytes`, each of a KV block's size.

    Raises InvalidParameter (field `arena_bytes` or `max_context_tokens`) when one block, or the context asked for,
    does not fit.
    """
    per_block = block_bytes(config, itemsize)
    affordable = arena_bytes // per_block
    if affordable < 1:
        raise InvalidParameter(
            f"arena_bytes {arena_bytes} holds no KV block of this model; give at least {per_block}",
            field="arena_bytes",
            minimum=per_block,
        )
    context = config.max_context_tokens
    if max_context_tokens is not None:
        if not 2 <= max_context_tokens <= context:
            raise InvalidParameter(
                f"max_context_tokens is {max_context_tokens}; give 2 to {context}, the model's own limit",
                field="max_context_tokens",
                limit=context,
            )
        if max_context_tokens > affordable * BLOCK_TOKENS:
            needed = -(-max_context_tokens // BLOCK_TOKENS) * per_block
            raise InvalidParameter(
                f"a context of {max_context_tokens} tokens needs {needed} bytes of KV cache, {arena_bytes} are given; "
                "raise arena_bytes or lower max_context_tokens",
                field="max_context_tokens",
                needed=needed,
            )
        context = max_context_tokens
    return ArenaPlan(affordable, min(context, affordable * BLOCK_TOKENS))
