"""The pool of KV blocks: which are free, and that each has one owner at most. Knows nothing of tokens or memory."""

from __future__ import annotations


class BlockPool:
    """Block ids 0 .. total - 1. The lowest numbers are handed out first, the last freed again first."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a block pool needs at least one block, not {total}")
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._owned = bytearray(total)

    @property
    def free(self) -> int:
        """Number of blocks without an owner."""
        return len(self._free)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Take `count` blocks. Raises ValueError when fewer are free: callers ask `free` first."""
        if not 0 <= count <= len(self._free):
            raise ValueError(f"{count} KV blocks asked for, {len(self._free)} are free")
        cut = len(self._free) - count
        taken = self._free[cut:]
        del self._free[cut:]
        taken.reverse()
        for block in taken:
            self._owned[block] = 1
        return tuple(taken)

    def release(self, blocks: tuple[int, ...]) -> None:
        """Give blocks back. Raises ValueError for a block nobody owns, and then frees none."""
        for block in blocks:
            if not (0 <= block < self.total and self._owned[block]):
                raise ValueError(f"KV block {block} is freed but has no owner")
        if len(set(blocks)) != len(blocks):
            raise ValueError("a KV block is freed twice at once")
        for block in blocks:
            self._owned[block] = 0
        self._free.extend(reversed(blocks))
