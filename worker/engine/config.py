"""What the engine is told once: the limits that its scheduler and its adapter slots keep to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of one engine; positive. Raises ValueError for values under which no request could ever run."""

    vocab_size: int
    eos_token_ids: frozenset[int]
    max_context_tokens: int
    """Prompt plus answer of one request, in tokens."""
    block_tokens: int
    """Tokens of one KV block."""
    total_blocks: int
    """Chunks of the arena; a chunk is one KV block, or a part of an adapter."""
    max_running_requests: int
    max_prefill_tokens: int
    """Prompt tokens computed in one step, over all requests."""
    max_resident_adapters: int
    """Adapter slots on the device."""
    chunk_bytes: int = 0
    """Bytes of a chunk; 0 where the runner does not say."""
    adapter_chunk_bytes: int = 0
    """Bytes of a chunk that an adapter can use; 0 where adapters live outside the arena and take no chunk."""
    max_adapter_bytes: int | None = None
    """Device bytes of all adapters together; None sets no bound beside slots and arena."""
    max_adapter_wait_s: float = 2.0
    """How long a waiting request may be overtaken by later ones, counted from the first that does."""

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "block_tokens",
            "total_blocks",
            "max_running_requests",
            "max_prefill_tokens",
            "max_resident_adapters",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_context_tokens < 2:
            raise ValueError(f"max_context_tokens is {self.max_context_tokens}; a prompt and an answer need 2")
        if self.max_adapter_bytes is not None and self.max_adapter_bytes < 1:
            raise ValueError(f"max_adapter_bytes is {self.max_adapter_bytes}; it must be at least 1")
        if not 0 <= self.adapter_chunk_bytes <= self.chunk_bytes:
            raise ValueError(f"adapter_chunk_bytes is {self.adapter_chunk_bytes} of chunks of {self.chunk_bytes} bytes")

    def blocks_for(self, tokens: int) -> int:
        """Return how many KV blocks hold `tokens` tokens."""
        return -(-tokens // self.block_tokens)

    def chunks_for_adapter(self, artifact_bytes: int) -> int:
        """Return the chunks that an adapter is granted before its load, when only its file's size is known.

        One more than its bytes fill: tiles do not straddle chunks. What the load leaves over is given back.
        """
        if not self.adapter_chunk_bytes:
            return 0
        return -(-artifact_bytes // self.adapter_chunk_bytes) + 1
