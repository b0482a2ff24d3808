"""Which computed KV block holds which prefix, by digest: identity, uses, and the order in which idle ones leave.

A block's key is a link of a SHA-256 chain over what its KV depends on: the base and its dtype, the adapter's artifact,
the tenant (which KV is never shared across), and all tokens up to the block's end. Only full blocks whose step
succeeded have one. Knows nothing of references or chunks' owners.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from worker.engine.idle import IdleOrder


def chain_start(base_identity: str, artifact_digest: str | None, tenant: str) -> bytes:
    """Return what a chain begins with; the base model's own is that of artifact None."""
    chain = hashlib.sha256()
    for part in (base_identity, "base" if artifact_digest is None else f"adapter {artifact_digest}", tenant):
        data = part.encode()
        chain.update(len(data).to_bytes(8, "little") + data)
    return chain.digest()


def next_key(previous: bytes, tokens: Sequence[int]) -> bytes:
    """Return the key of the block of `tokens` behind the one of key `previous` (or behind the chain's start)."""
    return hashlib.sha256(previous + array("I", tokens).tobytes()).digest()


@dataclass(slots=True)
class _Block:
    key: bytes
    uses: int = 1


class PrefixCache:
    """The published blocks, by key and by chunk."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, int] = {}
        self._blocks: dict[int, _Block] = {}
        self._idle: IdleOrder[int] = IdleOrder()

    def find(self, key: bytes) -> int | None:
        """Return the chunk that holds a prefix's block."""
        return self._by_key.get(key)

    def holds(self, chunk: int) -> bool:
        """Tell whether a chunk's block is published."""
        return chunk in self._blocks

    def is_idle(self, chunk: int) -> bool:
        """Tell whether a chunk's block is published and nobody refers to it."""
        return chunk in self._idle

    def uses(self, chunk: int) -> int:
        """Return how many requests have used a published block, the one that computed it included."""
        return self._blocks[chunk].uses

    def publish(self, key: bytes, chunk: int) -> None:
        """Offer a computed block to later requests, unless an equal one is offered already."""
        if key not in self._by_key:
            self._by_key[key] = chunk
            self._blocks[chunk] = _Block(key)

    def use(self, chunk: int) -> None:
        """Note that one more request uses a block."""
        self._blocks[chunk].uses += 1
        self._idle.discard(chunk)

    def retire(self, chunk: int, priority: float) -> None:
        """Note that nobody refers to a block any more; see IdleOrder."""
        self._idle.add(chunk, priority)

    def least(self) -> tuple[float, int] | None:
        """Return (priority, chunk) of the idle block that leaves first."""
        return self._idle.least()

    def forget(self, chunk: int) -> None:
        """Offer a block no more."""
        del self._by_key[self._blocks.pop(chunk).key]
        self._idle.discard(chunk)
