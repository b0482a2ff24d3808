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
    """Tokens computed in one step: one of every running answer, then prompts with the rest, a KV block at least."""
    max_resident_adapters: int
    """Adapter slots on the device."""
    chunk_bytes: int = 0
    """Bytes of a chunk; 0 where the runner does not say."""
    adapter_chunk_bytes: int = 0
    """Bytes of a chunk that an adapter can use; 0 where adapters live outside the arena and take no chunk."""
    max_adapter_bytes: int | None = None
    """Device bytes of all adapters together; None sets no bound beside slots and arena."""
    max_vocabulary_bytes: int | None = None
    """Device bytes of adapters' embeddings and heads, which lie beside the arena; None sets no bound."""
    max_adapter_wait_s: float = 2.0
    """How long a waiting request may be overtaken by later ones, counted from the first that does."""
    mixed_batch_ratio: float = 1.0
    """Share of `max_running_requests` that may run while they use more than one adapter."""
    kv_watermark: float = 0.01
    """Share of the arena that is left for running requests to grow when others are admitted or adapters loaded."""
    adapter_floor: float = 0.05
    """Share of the arena below which KV blocks do not push idle adapters, but for the oldest request."""
    prefix_cache: bool = True
    """Whether requests reuse blocks that others of the same tenant and adapter have computed."""
    base_identity: str = ""
    """What KV depends on beside adapter and tokens: the base's digest and dtype."""

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
        if not 0.5 <= self.mixed_batch_ratio <= 1:
            raise ValueError(f"mixed_batch_ratio is {self.mixed_batch_ratio}; it must be 0.5 to 1")
        for name in ("kv_watermark", "adapter_floor"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it is a share of the arena, 0 to less than 1")
        if not 0 <= self.adapter_chunk_bytes <= self.chunk_bytes:
            raise ValueError(f"adapter_chunk_bytes is {self.adapter_chunk_bytes} of chunks of {self.chunk_bytes} bytes")

    @property
    def watermark_chunks(self) -> int:
        """`kv_watermark` in chunks."""
        return int(self.total_blocks * self.kv_watermark)

    @property
    def adapter_floor_chunks(self) -> int:
        """`adapter_floor` in chunks."""
        return int(self.total_blocks * self.adapter_floor)

    @property
    def max_mixed_requests(self) -> int:
        """Requests that may run while they use more than one adapter."""
        return max(1, int(self.max_running_requests * self.mixed_batch_ratio))

    def blocks_for(self, tokens: int) -> int:
        """Return how many KV blocks hold `tokens` tokens."""
        return -(-tokens // self.block_tokens)

    def chunks_for_adapter(self, artifact_bytes: int) -> int:
        """Return the chunks that an adapter is granted before its load, by its file's bytes that go into the arena.

        One more than its bytes fill: tiles do not straddle chunks. What the load leaves over is given back.
        """
        if not self.adapter_chunk_bytes:
            return 0
        return -(-artifact_bytes // self.adapter_chunk_bytes) + 1
