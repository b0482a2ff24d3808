"""An adapter's factors as tiles in the arena: at most TILE_RANKS rank rows of A and of Bᵀ, and their scales.

Owns the formats, the records by which kernels find tiles, and the placing of tiles in chunks: each tile on a 64-byte
bound and never across two chunks, whose ids need not be neighbours. Both factors lie with rank rows outermost, so that
a CPU's vectors run along them; what a GPU wants instead is in `triton.tiles`.

What a module's output becomes after its LoRA (an affine: DoRA's scales, a LoRA bias) is a tile too, behind the module's
others; an adapter without any has no such record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex.errors import ResourceExhausted
from worker.kernels.vocabulary import VocabularyChange

TILE_RANKS: Final = 16
INT4_GROUP: Final = 64
"""Values along a row that share an INT4 scale."""

_ALIGNMENT: Final = 64
_PIECES_PER_CHUNK: Final = 8  # a piece takes an eighth of a chunk at most, so that little is ever left over


class Format(IntEnum):
    """How a tile's values are stored."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    INT8 = 3
    INT4 = 4
    """Two to a byte, value + 8: byte j of a group of L values holds value j low and value L/2 + j high. A group's scale
    is float16."""
    INT4_WIDE = 5
    """INT4 with float32 scales, for values that float16 does not hold."""


AFFINE: Final = len(Format)
"""In the place of a format: the record is of an affine, y <- scale · y + shift for the OUTER columns from OUT on. A is
where scale lies, B where shift, both [N] float32; RANKS and INNER are 0."""


class Field(IntEnum):
    """The columns of a record."""

    FORMAT = 0
    RANKS = 1
    INNER = 2
    """K, values of a row of A."""
    OUTER = 3
    """N, values of a row of Bᵀ."""
    OUT = 4
    """First column of the site's output that the module writes to."""
    A = 5
    """Byte offset in the arena of A [ranks, K], as are the next."""
    B = 6
    """Bᵀ [ranks, N]."""
    SCALE = 7
    """[ranks] float32 by which h is multiplied; of INT4 A's scales [ranks, groups of K]."""
    B_SCALE = 8
    """INT4: Bᵀ's scales [ranks, groups of N]; otherwise 0."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Rank rows of one module, ready to be placed; arrays C-contiguous, rank rows first."""

    place: int
    """layer · 4 + site."""
    format: Format
    out: int
    """First column of the site's output that the module writes to."""
    inner: int
    """K."""
    outer: int
    """N."""
    a: NDArray[Any]
    b: NDArray[Any]
    scale: NDArray[Any]
    """[ranks] float32; of INT4 [ranks, groups of K], `b_scale` then [ranks, groups of N]."""
    b_scale: NDArray[Any] | None = None

    def head(self) -> tuple[int, ...]:
        """Return a record's fields before Field.A."""
        return self.format, len(self.a), self.inner, self.outer, self.out

    def pieces(self) -> tuple[NDArray[Any], ...]:
        """Return what gets a place of its own, in the order of the fields from Field.A on."""
        own = (self.a, self.b, self.scale)
        return own if self.b_scale is None else (*own, self.b_scale)


@dataclass(frozen=True, slots=True)
class AffineTile:
    """What some columns of a site's output become after all tiles of their module: y <- scale · y + shift."""

    place: int
    out: int
    """First of the columns."""
    scale: NDArray[np.float32]
    shift: NDArray[np.float32]
    """Both [N]."""

    def head(self) -> tuple[int, ...]:
        """See Tile."""
        return AFFINE, 0, 0, len(self.scale), self.out

    def pieces(self) -> tuple[NDArray[Any], ...]:
        """See Tile."""
        return self.scale, self.shift


@dataclass(frozen=True, slots=True, eq=False)
class PlacedAdapter:
    """An adapter in the arena; a step that has looked it up may use it to its end."""

    version_digest: str
    records: NDArray[np.int64]
    """[n, 9] by Field, ordered by place."""
    starts: NDArray[np.int64]
    """[places + 1]: the first record of each place (layer · 4 + site)."""
    device_bytes: int
    """Of what lies in the arena."""
    chunks_used: int
    _: KW_ONLY
    vocabulary: VocabularyChange | None = None
    """What lies beside the arena, if anything does."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """An adapter's pieces in chunks, whichever those are: places count as if the chunks were neighbours from 0 on."""

    records: NDArray[np.int64]
    """[n, 9] by Field, ordered by place."""
    placed: NDArray[np.bool_]
    """[n, 4]: which fields from Field.A on are places."""
    starts: NDArray[np.int64]
    device_bytes: int
    num_chunks: int
    chunk_bytes: int

    def put(self, version_digest: str, chunk_ids: Sequence[int]) -> PlacedAdapter:
        """Return the adapter in the first of these chunks. Raises ResourceExhausted where they are too few."""
        if self.num_chunks > len(chunk_ids):
            raise ResourceExhausted(
                f"the adapter needs {self.num_chunks} chunks of {self.chunk_bytes} bytes, {len(chunk_ids)} were given"
            )
        records = self.records.copy()
        chunks, within = np.divmod(self.records[:, Field.A :], self.chunk_bytes)
        if self.num_chunks:
            first = np.asarray(chunk_ids[: self.num_chunks], dtype=np.int64) * self.chunk_bytes
            records[:, Field.A :] = np.where(self.placed, first[chunks] + within, 0)
        return PlacedAdapter(version_digest, records, self.starts, self.device_bytes, self.num_chunks)


def usable_chunk_bytes(chunk_bytes: int) -> int:
    """Return how much of each chunk but one is sure to be filled by an adapter that spans several."""
    return chunk_bytes - chunk_bytes // _PIECES_PER_CHUNK


def max_tile_ranks(row_bytes: int, chunk_bytes: int) -> int:
    """Return how many rank rows of at most `row_bytes` a tile may have, 1 to TILE_RANKS."""
    return max(1, min(TILE_RANKS, chunk_bytes // _PIECES_PER_CHUNK // max(row_bytes, 1)))


def max_affine_columns(chunk_bytes: int) -> int:
    """Return how many columns one affine may have, a multiple of 16: few enough that its pieces fill chunks up."""
    return max(16, chunk_bytes // _PIECES_PER_CHUNK // 64 * 16)


def lay_out(
    tiles: Sequence[Tile | AffineTile], *, num_places: int, chunk_bytes: int
) -> tuple[Layout, list[tuple[int, NDArray[Any]]]]:
    """Give every piece a place in chunks, the largest first; a chunk is opened when no earlier one has room.

    A module's affines come behind its tiles. Returns the layout and what is to be copied, in the order of the tiles:
    (place in bytes, array). Raises ResourceExhausted for a piece that no chunk holds.
    """
    tiles = sorted(tiles, key=lambda tile: tile.place)
    records = np.zeros((len(tiles), len(Field)), dtype=np.int64)
    placed = np.zeros((len(tiles), len(Field) - Field.A), dtype=np.bool_)
    waiting: list[tuple[int, int, int]] = []
    pieces: list[tuple[int, int, NDArray[Any]]] = []
    for index, tile in enumerate(tiles):
        records[index, : Field.A] = tile.head()
        for field, piece in enumerate(tile.pieces(), Field.A):
            waiting.append((-(-piece.nbytes // _ALIGNMENT) * _ALIGNMENT, index, field))
            pieces.append((index, field, piece))
            placed[index, field - Field.A] = True
    waiting.sort(key=lambda entry: -entry[0])
    filled: list[int] = []
    size_before, chunk = 0, 0
    for size, index, field in waiting:
        if size != size_before:
            size_before, chunk = size, 0  # earlier chunks may have room again
        while chunk < len(filled) and filled[chunk] + size > chunk_bytes:
            chunk += 1
        if chunk == len(filled):
            if size > chunk_bytes:
                raise ResourceExhausted(
                    f"the adapter has rows of {size} bytes, which the base's chunks of {chunk_bytes} do not hold"
                )
            filled.append(0)
        records[index, field] = chunk * chunk_bytes + filled[chunk]
        filled[chunk] += size
    starts = np.searchsorted([tile.place for tile in tiles], np.arange(num_places + 1)).astype(np.int64)
    layout = Layout(records, placed, starts, sum(filled), len(filled), chunk_bytes)
    return layout, [(int(records[index, field]), piece) for index, field, piece in pieces]


def place_tiles(
    tiles: Sequence[Tile | AffineTile],
    *,
    version_digest: str,
    num_places: int,
    chunk_bytes: int,
    chunk_ids: Sequence[int],
) -> tuple[PlacedAdapter, list[tuple[int, NDArray[Any]]]]:
    """Lay tiles out in chunks.

    Returns the adapter and what is to be copied: (byte offset in the arena, array). Raises ResourceExhausted when the
    chunks do not hold it.
    """
    layout, pieces = lay_out(tiles, num_places=num_places, chunk_bytes=chunk_bytes)
    adapter = layout.put(version_digest, chunk_ids)
    return adapter, [
        (chunk_ids[place // chunk_bytes] * chunk_bytes + place % chunk_bytes, piece) for place, piece in pieces
    ]


def read_tile(memory: Tensor, record: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Return a tile's A [ranks, K] and Bᵀ [ranks, N] as float32 with all scales folded in: ΔW = B A."""
    kind, ranks = Format(int(record[Field.FORMAT])), int(record[Field.RANKS])
    inner, outer = int(record[Field.INNER]), int(record[Field.OUTER])

    def read(field: Field, width: int, dtype: torch.dtype) -> Tensor:
        at = int(record[field])
        return memory[at : at + ranks * width * dtype.itemsize].view(dtype).view(ranks, width)

    if kind in _SCALES:
        a, b = (_nibbles(read(f, width // 2, torch.uint8)) for f, width in ((Field.A, inner), (Field.B, outer)))
        scales = (
            read(f, -(-width // INT4_GROUP), _SCALES[kind]).float()
            for f, width in ((Field.SCALE, inner), (Field.B_SCALE, outer))
        )
        a_scale, b_scale = (scale.repeat_interleave(INT4_GROUP, dim=1) for scale in scales)
        return a * a_scale[:, :inner], b * b_scale[:, :outer]
    stored = _STORED[kind]
    return read(Field.A, inner, stored).float() * read(Field.SCALE, 1, torch.float32), read(
        Field.B, outer, stored
    ).float()


def read_affine(memory: Tensor, record: NDArray[np.int64]) -> tuple[slice, Tensor, Tensor]:
    """Return the columns of an affine's record, and scale and shift [N] float32."""
    first, count = int(record[Field.OUT]), int(record[Field.OUTER])
    scale, shift = (
        memory[int(record[field]) : int(record[field]) + 4 * count].view(torch.float32) for field in (Field.A, Field.B)
    )
    return slice(first, first + count), scale, shift


def _nibbles(packed: Tensor) -> Tensor:
    groups = torch.split(packed, INT4_GROUP // 2, dim=1)
    return torch.cat([half for group in groups for half in (group & 15, group >> 4)], dim=1).float() - 8


_SCALES: Final = {Format.INT4: torch.float16, Format.INT4_WIDE: torch.float32}
_STORED: Final = {
    Format.FLOAT32: torch.float32,
    Format.BFLOAT16: torch.bfloat16,
    Format.FLOAT16: torch.float16,
    Format.INT8: torch.int8,
}
