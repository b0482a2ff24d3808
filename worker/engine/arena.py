"""Who owns each chunk of the device's one arena. Knows ids and counts, nothing of tokens, adapters or memory.

All chunks are equal and any free one serves any use, so nothing fragments, whatever the churn: `free` chunks are always
`free` chunks that can be had. A chunk is free, or a KV block that requests refer to, or a part of an adapter, or a
computed KV block that is kept for later requests though nobody refers to it. The ValueErrors are broken invariants.

A chunk that a step in flight still reads must not be handed out before that step is answered. Steps are synchronous, so
between them everything may be freed at once; what ends while one is in flight is freed by the scheduler afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum


class Use(IntEnum):
    """What a chunk is for."""

    FREE = 0
    KV = 1
    ADAPTER = 2
    IDLE_PREFIX = 3


class Arena:
    """Chunk ids 0 .. total - 1. The lowest numbers are handed out first, the last freed again first."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"an arena needs at least one chunk, not {total}")
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._uses = bytearray(total)
        self._references = [0] * total
        self._counts = [total, 0, 0, 0]

    @property
    def free(self) -> int:
        """Number of chunks without an owner."""
        return self._counts[Use.FREE]

    def count(self, use: Use) -> int:
        """Return the number of chunks of a use."""
        return self._counts[use]

    def take(self, count: int, use: Use) -> tuple[int, ...]:
        """Take free chunks, each with one reference where the use is KV.

        Raises ValueError when fewer are free: callers ask `free` first.
        """
        if not 0 <= count <= len(self._free):
            raise ValueError(f"{count} chunks asked for, {len(self._free)} are free")
        cut = len(self._free) - count
        taken = self._free[cut:]
        del self._free[cut:]
        taken.reverse()
        for chunk in taken:
            self._uses[chunk] = use
            self._references[chunk] = 1
        self._counts[Use.FREE] -= count
        self._counts[use] += count
        return tuple(taken)

    def share(self, chunk: int) -> None:
        """Add a reference to a KV block; an idle one is a request's again."""
        use = self._uses[chunk]
        if use == Use.KV:
            self._references[chunk] += 1
        elif use == Use.IDLE_PREFIX:
            self._move(chunk, Use.KV)
            self._references[chunk] = 1
        else:
            raise ValueError(f"chunk {chunk} holds no computed KV block")

    def drop(self, chunk: int, *, keep: bool) -> bool:
        """Drop a reference to a KV block and return whether it was the last: then it is free, or idle to `keep`."""
        self._check(chunk, Use.KV)
        self._references[chunk] -= 1
        if self._references[chunk]:
            return False
        self._move(chunk, Use.IDLE_PREFIX if keep else Use.FREE)
        if not keep:
            self._free.append(chunk)
        return True

    def release(self, chunks: Sequence[int], use: Use) -> None:
        """Free chunks of an adapter, or idle KV blocks. Raises ValueError for any other, and then frees none."""
        if use == Use.KV:
            raise ValueError("KV blocks have references: drop them")
        for chunk in chunks:
            self._check(chunk, use)
        if len(set(chunks)) != len(chunks):
            raise ValueError("a chunk is freed twice at once")
        for chunk in reversed(chunks):
            self._move(chunk, Use.FREE)
            self._free.append(chunk)

    def _check(self, chunk: int, use: Use) -> None:
        if not (0 <= chunk < self.total and self._uses[chunk] == use):
            raise ValueError(f"chunk {chunk} is given back but is not in use as {use.name}")

    def _move(self, chunk: int, use: Use) -> None:
        self._counts[self._uses[chunk]] -= 1
        self._counts[use] += 1
        self._uses[chunk] = use
