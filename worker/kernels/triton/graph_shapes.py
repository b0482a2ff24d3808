"""Which steps a captured graph can stand for: sizes of decode steps, and the choice among them. Pure.

A graph computes up to its numbers of rows, pieces of keys, and rank tiles; what a step lacks of them counts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

PIECES_PER_ROW: Final = (4, 32, 256)
"""Pieces of keys (256 positions each) that a graph has room for, on average over its rows; then as many as can be."""
RANK_TILES: Final = (1, 4)
"""Rank tiles of a module (16 ranks each) that a graph has room for if every row had an adapter of its own; then as many
as can be. Without adapters there are graphs without any LoRA kernel."""


@dataclass(frozen=True, slots=True, order=True)
class GraphShape:
    """A captured step's size."""

    rows: int
    pieces: int
    """Pieces of keys, of all rows together."""
    rank_tiles: int
    """0: no LoRA kernels."""


def graph_shapes(max_rows: int, *, max_row_pieces: int, max_pieces: int, max_rank_tiles: int) -> list[GraphShape]:
    """Return all shapes for steps of up to `max_rows` rows, the largest first, as graphs share the memory of those.

    A row has up to `max_row_pieces` pieces of keys, and there are buffers for `max_pieces` in all. `max_rank_tiles` is
    0 where there are no adapters.
    """
    tiles = {0, *(level for level in RANK_TILES if level < max_rank_tiles), max_rank_tiles}
    shapes = {
        GraphShape(rows, min(rows * per_row, max_pieces), level)
        for rows in row_buckets(max_rows)
        for per_row in (*(level for level in PIECES_PER_ROW if level < max_row_pieces), max_row_pieces)
        for level in tiles
    }
    return sorted(shapes, reverse=True)


def row_buckets(max_rows: int) -> tuple[int, ...]:
    """1, 2, 4, 8, … and `max_rows`."""
    powers = [1 << exponent for exponent in range(max_rows.bit_length())]
    return tuple(sorted({power for power in powers if power <= max_rows} | {max_rows}))


def bucket_of(shapes: Iterable[GraphShape], rows: int) -> int | None:
    """Return the least number of rows of a shape that holds `rows`."""
    return min((shape.rows for shape in shapes if shape.rows >= rows), default=None)


def choose(shapes: Iterable[GraphShape], *, bucket: int, pieces: int, rank_tiles: int) -> GraphShape | None:
    """Return the smallest shape of `bucket` rows with room for a step, None without one: it then runs without a graph.

    `rank_tiles` is what the step's LoRA needs there, 0 where it has none: it then gets a graph without LoRA.
    """
    fitting = [
        shape
        for shape in shapes
        if shape.rows == bucket
        and shape.pieces >= pieces
        and shape.rank_tiles >= rank_tiles
        and (shape.rank_tiles > 0) == (rank_tiles > 0)
    ]
    return min(fitting, default=None)
