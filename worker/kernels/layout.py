"""What kernels work on: the arena of equal chunks, and the rows of a step.

A chunk is one KV block: BLOCK_TOKENS positions of all layers, `[layers][key, value][kv_heads][BLOCK_TOKENS][head_dim]`.
Adapters' tiles lie in the same chunks (`tiles`). What a chunk holds is its owner's affair; a new owner may find
anything in it, NaN included, and must not let it into a result.

Rows are the step's tokens, flattened over all requests, `[T, …]`; tokens of one adapter are neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.kernels.tiles import PlacedAdapter

BLOCK_TOKENS: Final = 16
"""Positions of one KV block."""


class Site(IntEnum):
    """A place an adapter attaches: modules that read the same input share one site."""

    QKV = 0
    O = 1  # noqa: E741 - the field's name for it
    GATE_UP = 2
    DOWN = 3


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The model's attention: counts of layers and heads, and a head's dimensions."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def block_elements(self) -> int:
        """Numbers in a KV block."""
        return self.num_layers * 2 * self.num_kv_heads * BLOCK_TOKENS * self.head_dim


class Arena:
    """The device memory that KV blocks and adapters share: `num_chunks` equal chunks in one allocation."""

    def __init__(self, shape: AttentionShape, *, num_chunks: int, dtype: torch.dtype, device: torch.device) -> None:
        """Take the memory; on a CPU a page counts only once it is written. `dtype` is that of keys and values."""
        self.shape, self.num_chunks = shape, num_chunks
        self.chunk_bytes = shape.block_elements * dtype.itemsize
        size = num_chunks * self.chunk_bytes
        if device.type == "cpu":  # torch would write the zeros; the system has pages of them that cost nothing
            self.memory = torch.from_numpy(np.zeros(size, dtype=np.uint8))
        else:
            self.memory = torch.zeros(size, dtype=torch.uint8, device=device)
        heads, dim = shape.num_kv_heads, shape.head_dim
        self.kv: Tensor = self.memory.view(dtype).view(num_chunks, shape.num_layers, 2, heads, BLOCK_TOKENS, dim)


@dataclass(frozen=True, slots=True)
class Rows:
    """One request's part of a step: rows [start, start + count) at positions [position, position + count)."""

    start: int
    count: int
    position: int
    block_ids: tuple[int, ...]
    """KV blocks of positions 0 .. position + count - 1."""
    adapter: PlacedAdapter | None


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """P rows whose token the step before chooses; the host need not know it when this step begins."""

    rows: Tensor
    """[P] int64, on the device: rows of this step,"""
    chosen: Tensor
    """[P] int64, on the device: and their tokens, once the step before is computed."""

    def fill(self, token_ids: Tensor) -> None:
        """Write the tokens where they belong in a step's, [T] int64 on the device."""
        token_ids.index_copy_(0, self.rows, self.chosen)


@dataclass(frozen=True, slots=True)
class Batch:
    """The T rows of a step. Requests of one adapter are neighbours; those without come first."""

    token_ids: NDArray[np.int64]
    """[T]; of pending rows, anything."""
    positions: NDArray[np.int64]
    """[T]."""
    slots: NDArray[np.int64]
    """[T] where each row's key and value go: block · BLOCK_TOKENS + offset."""
    requests: tuple[Rows, ...]
    pending: PendingTokens | None = None
    changes_vocabulary: bool = False
    """Whether an adapter in it has an embedding or a head of its own."""
