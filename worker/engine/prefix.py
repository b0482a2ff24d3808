"""Which computed KV block holds which prefix, by digest: identity, uses, and the order in which idle ones leave.

A block's key is a link of a SHA-256 chain over what its KV depends on: the base and its dtype, the adapter's artifact,
the tenant (which KV is never shared across), and all tokens up to the block's end. Only full blocks whose step
succeeded have one. Knows nothing of references or chunks' owners.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass


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
    order: tuple[float, int] | None = None
    """(priority, number) while it is idle."""


class PrefixCache:
    """The published blocks, by key and by chunk."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, int] = {}
        self._blocks: dict[int, _Block] = {}
        self._idle: list[tuple[float, int, int]] = []  # heap of (priority, number, chunk), with stale entries
        self._num_idle = 0
        self._number = 0

    def find(self, key: bytes) -> int | None:
        """Return the chunk that holds a prefix's block."""
        return self._by_key.get(key)

    def holds(self, chunk: int) -> bool:
        """Tell whether a chunk's block is published."""
        return chunk in self._blocks

    def is_idle(self, chunk: int) -> bool:
        """Tell whether nobody refers to a published block."""
        return self._blocks[chunk].order is not None

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
        block = self._blocks[chunk]
        block.uses += 1
        if block.order is not None:
            block.order = None
            self._num_idle -= 1

    def retire(self, chunk: int, priority: float) -> None:
        """Note that a block is idle. The lowest priority leaves first; of equals the one that was retired first."""
        self._number += 1
        self._blocks[chunk].order = (priority, self._number)
        self._num_idle += 1
        if len(self._idle) > 64 + 4 * self._num_idle:
            self._idle = [entry for entry in self._idle if self._is_current(entry)]
            heapq.heapify(self._idle)
        heapq.heappush(self._idle, (priority, self._number, chunk))

    def least(self) -> tuple[float, int] | None:
        """Return (priority, chunk) of the idle block that leaves first."""
        while self._idle and not self._is_current(self._idle[0]):
            heapq.heappop(self._idle)
        return (self._idle[0][0], self._idle[0][2]) if self._idle else None

    def forget(self, chunk: int) -> None:
        """Offer a block no more."""
        block = self._blocks.pop(chunk)
        del self._by_key[block.key]
        self._num_idle -= block.order is not None

    def _is_current(self, entry: tuple[float, int, int]) -> bool:
        block = self._blocks.get(entry[2])
        return block is not None and block.order == entry[:2]
