"""How one LoRA factor becomes tiles: the bytes the kernels read. Numpy only, vectorised; knows no arena and no device.

A tile is up to 16 rank rows of one factor over up to 1 024 columns: a rank's sixteens, and a tile of as many rows as
are left, so that a rank costs what it weighs. Columns go in groups of 64, the last one filled up with zeros. Both
factors lie alike, columns innermost, so that a single row is as long a line as one of many and every lane reads 16
bytes of it at once:

    16-bit and INT8    [rows][columns]
    INT4               [rows][groups][32], byte j of a group holds column j (low nibble) and 32 + j (high), value + 8

After the elements come the scales:

    16-bit and INT8    of A float32 [rows], alpha/r folded in; of B none
    INT4               bfloat16 [groups][rows], of A with alpha/r folded in

What a module's output becomes after its LoRA (DoRA's scales, a bias) is tiles as well: scale, then shift, float32, of
up to 1 024 columns, each filled up to a multiple of four numbers.

A tile is at most 33 KiB and starts on 32 bytes, a sector of a GPU's memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

TILE_ROWS: Final = 16
TILE_COLUMNS: Final = 1024
GROUP: Final = 64
"""Columns that share an INT4 scale, and the granule of a tile's width."""
ALIGNMENT: Final = 32
"""Bytes; offsets into the arena count in these."""


class Format(IntEnum):
    """What a tile's elements are; the kernels' constants are these numbers."""

    BF16 = 0
    INT8 = 1
    INT4 = 2
    FP16 = 3


@dataclass(frozen=True, slots=True)
class RankPart:
    """Some rank rows of one module in one format: ΔW += Σ_r scale[r] · dequantized(b_t[r])ᵀ ⊗ dequantized(a[r]).

    16-bit: a [r, K], b_t [r, N] as uint16 bits of BF16 or FP16. INT8: a, b_t int8, with both factors' scales in
    `scale`. INT4: a [r, ⌈K/2⌉], b_t [r, ⌈N/2⌉] uint8 nibbles, value + 8, in groups of 64 along a row of which byte j
    holds value j (low) and L/2 + j (high) of a group of L values; a_scale [r, ⌈K/64⌉], b_scale [r, ⌈N/64⌉] float.
    """

    format: Format
    a: NDArray[Any]
    b_t: NDArray[Any]
    scale: NDArray[np.float32]
    """[r], alpha/r included."""
    in_features: int
    out_features: int
    a_scale: NDArray[Any] | None = None
    b_scale: NDArray[Any] | None = None

    @property
    def rank(self) -> int:
        """Rank rows of this part."""
        return len(self.scale)


@dataclass(frozen=True, slots=True)
class RankTile:
    """The tiles of the same rank rows over all column ranges of both factors."""

    format: Format
    rows: int
    a: tuple[Bytes, ...]
    b: tuple[Bytes, ...]


def num_column_tiles(features: int) -> int:
    """Column ranges of a factor of so many columns."""
    return -(-features // TILE_COLUMNS)


def rank_rows(rank: int) -> tuple[int, ...]:
    """Rows of the tiles of a rank: sixteens, then what is left."""
    full, rest = divmod(rank, TILE_ROWS)
    return (TILE_ROWS,) * full + ((rest,) if rest else ())


def cut(parts: tuple[RankPart, ...]) -> tuple[RankTile, ...]:
    """Cut a module's parts into tiles, in their order. Raises ValueError where shapes contradict each other."""
    return tuple(tile for part in parts for tile in _cut_part(part))


def affine_tiles(scale: NDArray[np.float32], shift: NDArray[np.float32]) -> tuple[Bytes, ...]:
    """Cut an affine of a module, both [columns], into tiles by column range."""
    tiles = []
    for first in range(0, len(scale), TILE_COLUMNS):
        here = slice(first, first + TILE_COLUMNS)
        filled = np.zeros((2, -(-len(scale[here]) // 4) * 4), dtype=np.float32)
        filled[0, : len(scale[here])], filled[1, : len(scale[here])] = scale[here], shift[here]
        tiles.append(_raw(filled))
    return tuple(tiles)


def _cut_part(part: RankPart) -> list[RankTile]:
    a, b, a_scale, b_scale = _widened(part)
    out = []
    start = 0
    for rows in rank_rows(part.rank):
        here = slice(start, start + rows)
        start += rows
        a_tiles = _cut_columns(a[here], _scales(part, a_scale, here, part.scale[here]))
        b_tiles = _cut_columns(b[here], _scales(part, b_scale, here, None))
        out.append(RankTile(part.format, rows, a_tiles, b_tiles))
    return out


def _widened(part: RankPart) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None, NDArray[Any] | None]:
    """Check the part and return its factors and group scales by group: [r, groups, elements], [r, groups]."""
    if part.format is not Format.INT4:
        item = np.int8 if part.format is Format.INT8 else np.uint16
        for name, factor, features in (("a", part.a, part.in_features), ("b_t", part.b_t, part.out_features)):
            if factor.shape != (part.rank, features) or factor.dtype != item:
                wanted = (part.rank, features)
                raise ValueError(f"{name} is {factor.dtype} {factor.shape}, not {np.dtype(item)} {wanted}")
        return _grouped(part.a), _grouped(part.b_t), None, None
    if part.a_scale is None or part.b_scale is None:
        raise ValueError("an INT4 part needs a_scale and b_scale")
    # alpha/r goes into the scales of A, as it cannot go into nibbles.
    a_scale = part.a_scale.astype(np.float32) * part.scale[:, None]
    return _nibbles(part.a, part.in_features), _nibbles(part.b_t, part.out_features), a_scale, part.b_scale


def _grouped(factor: NDArray[Any]) -> NDArray[Any]:
    """[r, columns] to [r, groups, 64]."""
    rank, columns = factor.shape
    if columns % GROUP:
        factor = np.pad(factor, ((0, 0), (0, -columns % GROUP)))
    return factor.reshape(rank, -1, GROUP)


def _nibbles(packed: NDArray[Any], columns: int) -> NDArray[Any]:
    """[r, ⌈columns/2⌉] to [r, groups, 32]; the last group is spread to 64 values where it has fewer."""
    rank, full = len(packed), columns // GROUP
    rest = columns % GROUP
    if packed.shape[1] != -(-columns // 2) or packed.dtype != np.uint8:
        raise ValueError(f"nibbles of {columns} columns are {packed.dtype} {packed.shape}")
    groups = packed[:, : full * GROUP // 2].reshape(rank, full, GROUP // 2)
    if not rest:
        return groups
    tail = packed[:, full * GROUP // 2 :]
    values = np.full((rank, GROUP), 8, dtype=np.uint8)
    half = tail.shape[1]
    values[:, :half], values[:, half:rest] = tail & 15, (tail >> 4)[:, : rest - half]
    last = values[:, : GROUP // 2] | (values[:, GROUP // 2 :] << 4)
    return np.concatenate((groups, last[:, None]), axis=1)


def _scales(
    part: RankPart, groups: NDArray[Any] | None, here: slice, row_scale: NDArray[np.float32] | None
) -> NDArray[Any] | None:
    """Return a tile's scales: by group, [groups, rows] bfloat16 bits, or by row, [rows]; None without any."""
    if part.format is Format.INT4:
        assert groups is not None  # noqa: S101 - _widened returns them for INT4
        return round_to_bfloat16(groups[here].astype(np.float32).T)
    return None if row_scale is None else row_scale.astype(np.float32)


def _cut_columns(factor: NDArray[Any], scales: NDArray[Any] | None) -> tuple[Bytes, ...]:
    """Cut [rows, groups, elements] into tiles by column range."""
    per_tile = TILE_COLUMNS // GROUP
    out = []
    for first in range(0, factor.shape[1], per_tile):
        pieces = [_raw(factor[:, first : first + per_tile])]
        if scales is not None:
            pieces.append(_raw(scales[first : first + per_tile] if scales.ndim == 2 else scales))
        out.append(np.concatenate(pieces))
    return tuple(out)


def _raw(array: NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def round_to_bfloat16(array: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(array).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
