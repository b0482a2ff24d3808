"""Where an adapter's tiles go in the chunks it was granted. Pure; knows sizes only.

First fit by decreasing size: a tile never lies across two chunks, and the small ones fill what the large ones leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worker.kernels.triton.tiles import ALIGNMENT


@dataclass(frozen=True, slots=True)
class TilePlaces:
    """Where each tile lies; chunks are counted from 0 in the order granted."""

    chunks: NDArray[np.int64]
    offsets: NDArray[np.int64]
    """Bytes from the start of the chunk, multiples of ALIGNMENT."""
    num_chunks: int
    used_bytes: int
    """Of all tiles, each up to the bound on which the next may start."""


def place(sizes: Sequence[int], chunk_bytes: int) -> TilePlaces:
    """Place tiles of `sizes` bytes. Raises ValueError when one is larger than a chunk."""
    whole = np.asarray(sizes, dtype=np.int64)
    aligned = -(-whole // ALIGNMENT) * ALIGNMENT
    usable = chunk_bytes // ALIGNMENT * ALIGNMENT
    if len(aligned) and int(aligned.max()) > usable:
        raise ValueError(f"a tile of {int(whole.max())} bytes does not fit a chunk of {chunk_bytes}")
    chunks, offsets = np.zeros_like(aligned), np.zeros_like(aligned)
    used: list[int] = []
    # Sizes are few, so all tiles of one size are placed at once.
    for size in sorted(set(aligned.tolist()), reverse=True):
        left = np.flatnonzero(aligned == size)
        chunk = 0
        while len(left):
            if chunk == len(used):
                used.append(0)
            here = min((usable - used[chunk]) // size, len(left))
            chunks[left[:here]] = chunk
            offsets[left[:here]] = used[chunk] + size * np.arange(here)
            used[chunk] += size * here
            left = left[here:]
            chunk += 1
    return TilePlaces(chunks, offsets, len(used), sum(used))
