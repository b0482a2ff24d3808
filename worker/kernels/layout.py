"""The values kernels work on: the paged KV cache, who attends to what in a step, and adapters' factors by site.

Rows are the step's tokens, flattened over all requests, `[T, …]`; tokens of one adapter are neighbours. Block ids index
the KV cache's blocks. Built once per step by the model, read by every layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor


class Site(IntEnum):
    """A place an adapter attaches: modules that read the same input share one site."""

    QKV = 0
    O = 1  # noqa: E741 - the field's name for it
    GATE_UP = 2
    DOWN = 3


@dataclass(frozen=True, slots=True)
class KvCache:
    """Keys and values of all layers, each [layers, kv_heads, blocks, block_tokens, head_dim].

    Every element is finite at all times (writers see to it), so that a masked position contributes exactly nothing.
    """

    keys: Tensor
    values: Tensor

    @property
    def block_tokens(self) -> int:
        """Positions in a block."""
        return self.keys.shape[3]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Several positions of one request, rows [start, end): a whole prompt or a part of it."""

    start: int
    end: int
    position: int
    """Position of the first row."""
    blocks: Tensor
    """[n] int64 block ids of positions 0 .. position + end - start - 1."""
    visible: Tensor | None
    """[end - start, position + end - start] bool, True where a row may look; None when position is 0 (plain causal)."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Single positions of `b` requests of similar length, computed together over `n` blocks each."""

    rows: Tensor
    """[b] int64."""
    blocks: Tensor
    """[b * n] int64 block ids, row-major; rows with fewer blocks are filled up with block 0."""
    lengths: Tensor
    """[b] int64 positions each row may look at, its own included."""
    beyond: Tensor
    """[b, 1, n * block_tokens] bool, True past a row's length."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Where the step's keys go and who looks at what."""

    slots: Tensor
    """[T] int64 flat cache position (block * block_tokens + offset) of every row."""
    chunks: tuple[Chunk, ...]
    decodes: tuple[DecodeGroup, ...]


@dataclass(frozen=True, slots=True)
class Expand:
    """One module's second factor: y[:, out] += scale · h[:, rank] @ factor_t."""

    out: slice
    rank: slice
    factor_t: Tensor
    """Bᵀ [r, out], a view of B [out, r] with the reduction dimension innermost."""
    scale: float


@dataclass(frozen=True, slots=True)
class SiteFactors:
    """An adapter's factors at one site of one layer."""

    shrink_t: Tensor
    """Aᵀ [in, R], a view of the site's modules' A stacked to [R, in]."""
    expands: tuple[Expand, ...]


LayerFactors = tuple[SiteFactors | None, SiteFactors | None, SiteFactors | None, SiteFactors | None]
"""By Site; None where the adapter does not attach."""


@dataclass(frozen=True, slots=True)
class LoraGroup:
    """Rows [start, end) that share an adapter, and its factors by layer."""

    start: int
    end: int
    layers: tuple[LayerFactors, ...]
