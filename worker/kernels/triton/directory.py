"""Which tile lies where: the table the kernels read, and an adapter's image as it will lie in its chunks.

The table is int64 [layers, slots · stride]; a slot's part of a layer holds, for every module and factor, the entry of
rank tile t and column range c at `base + t · ranges + c`. An entry is `offset / 32 << 8 | format << 5 | rows`, 0 where
there is no tile. Affines have a table of their own, [layers, slots · affine stride], of an entry for each module's
column range, as few adapters have any. Host code counts; only `TileTable.put` and `clear` touch the device, on the
current stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.kernels.placing import SiteShape
from worker.kernels.triton.placement import TilePlaces, place
from worker.kernels.triton.tiles import ALIGNMENT, TILE_ROWS, Bytes, RankTile, num_column_tiles

ModuleAffines = Mapping[tuple[int, int], Sequence[tuple[Bytes, ...]]]
"""(site, slice) to the tiles of the module's affine by layer, one a column range; an empty tuple where it has none."""
ModuleTiles = Mapping[tuple[int, int], Sequence[tuple[RankTile, ...]]]
"""(site, slice) to the module's rank tiles by layer; an empty tuple where the adapter does not attach."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where modules' entries lie in a slot. `max_rank` bounds the ranks; two parts of a rank may cost a tile more."""

    sites: tuple[SiteShape, ...]
    max_rank: int

    @property
    def max_tiles(self) -> int:
        """Rank tiles of one module at most."""
        return -(-self.max_rank // TILE_ROWS) + 1

    def modules(self) -> list[tuple[int, int]]:
        """Every (site, slice), in the order of their entries."""
        return [(site, part) for site, shape in enumerate(self.sites) for part in range(len(shape.widths))]

    def ranges(self, site: int, part: int, factor: int) -> int:
        """Column ranges of a module's A (factor 0) or B (1)."""
        shape = self.sites[site]
        return num_column_tiles(shape.widths[part] if factor else shape.in_features)

    def bases(self) -> dict[tuple[int, int, int], int]:
        """First entry of each (site, slice, factor) in a slot."""
        out: dict[tuple[int, int, int], int] = {}
        used = 0
        for site, part in self.modules():
            for factor in (0, 1):
                out[site, part, factor] = used
                used += self.max_tiles * self.ranges(site, part, factor)
        return out

    @property
    def stride(self) -> int:
        """Entries of a slot in one layer, rounded up so that every layer's part starts on 128 bytes."""
        used = sum(self.max_tiles * self.ranges(site, part, f) for site, part in self.modules() for f in (0, 1))
        return -(-used // 16) * 16

    def affine_bases(self) -> dict[tuple[int, int], int]:
        """First entry of each (site, slice) in a slot's part of the table of affines; a site's follow each other."""
        out: dict[tuple[int, int], int] = {}
        used = 0
        for site, part in self.modules():
            out[site, part] = used
            used += self.ranges(site, part, 1)
        return out

    @property
    def affine_stride(self) -> int:
        """Entries of a slot in one layer of the table of affines, rounded up as `stride` is."""
        used = sum(self.ranges(site, part, 1) for site, part in self.modules())
        return -(-used // 16) * 16


@dataclass(frozen=True, slots=True)
class SiteEntries:
    """One site of a geometry, as planning a step asks for it."""

    modules: NDArray[np.int64]
    """Row in `Geometry.modules` of each of the site's modules."""
    first_a: NDArray[np.int64]
    first_b: NDArray[np.int64]
    """First entries of each module's factors in a slot."""
    ranges_a: int

    @classmethod
    def of(cls, geometry: Geometry, site: int) -> SiteEntries:
        """Count a site's entries once, for all steps."""
        bases = geometry.bases()
        rows = [row for row, (where, _) in enumerate(geometry.modules()) if where == site]
        first = [[bases[site, part, factor] for part in range(len(rows))] for factor in (0, 1)]
        modules, first_a, first_b = (np.array(values, dtype=np.int64) for values in (rows, *first))
        return cls(modules, first_a, first_b, geometry.ranges(site, 0, 0))


@dataclass(frozen=True, slots=True)
class AdapterImage:
    """An adapter ready to be copied to `len(chunks)` chunks, whichever they are."""

    chunks: NDArray[np.uint8]
    """[n, chunk_bytes]."""
    entries: NDArray[np.int64]
    """[layers, stride]: format and rows of every entry; `place_of` says where the tile lies."""
    place_of: NDArray[np.int64]
    """[layers, stride, 2]: chunk in `chunks`, and offset in units of ALIGNMENT."""
    summary: NDArray[np.int32]
    """[modules, 2]: see TileTable.summary."""
    affines: NDArray[np.int64]
    """[layers, affine stride, 3]: whether there is a tile, and its place as in `place_of`."""
    affine_sites: NDArray[np.bool_]
    """[sites]: whether a module there has an affine in some layer."""
    tile_bytes: int
    """Bytes of all tiles with their alignment, without what chunks' ends leave unused."""


def build_image(
    geometry: Geometry, num_layers: int, tiles: ModuleTiles, chunk_bytes: int, affines: ModuleAffines | None = None
) -> AdapterImage:
    """Lay an adapter out. Raises ValueError for a rank or tile that the geometry or a chunk has no room for."""
    if chunk_bytes % ALIGNMENT:
        raise ValueError(f"chunks of {chunk_bytes} bytes are not a multiple of {ALIGNMENT}")
    bases = geometry.bases()
    entries = np.zeros((num_layers, geometry.stride), dtype=np.int64)
    place_of = np.zeros((num_layers, geometry.stride, 2), dtype=np.int64)
    summary = np.zeros((len(geometry.modules()), 2), dtype=np.int32)
    flat: list[Bytes] = []
    layers: list[int] = []
    columns: list[int] = []
    for row, module in enumerate(geometry.modules()):
        by_layer = tiles.get(module, ())
        most = max((len(ranks) for ranks in by_layer), default=0)
        if most > geometry.max_tiles:
            raise ValueError(f"module {module} has {most} rank tiles, room is for {geometry.max_tiles}")
        summary[row] = _summary(by_layer)
        for layer, ranks in enumerate(by_layer):
            for t, rank_tile in enumerate(ranks):
                for factor, cut in ((0, rank_tile.a), (1, rank_tile.b)):
                    count = geometry.ranges(*module, factor)
                    if len(cut) != count:
                        raise ValueError(f"module {module} has {len(cut)} column ranges, not {count}")
                    first = bases[*module, factor] + t * count
                    entries[layer, first : first + count] = rank_tile.format << 5 | rank_tile.rows
                    flat += cut
                    layers += [layer] * count
                    columns += range(first, first + count)
    rank_tiles = len(flat)
    of_affines = np.zeros((num_layers, geometry.affine_stride, 3), dtype=np.int64)
    affine_sites = np.zeros(len(geometry.sites), dtype=np.bool_)
    affine_at: tuple[list[int], list[int]] = ([], [])
    first_affines = geometry.affine_bases()
    for module, of_layers in (affines or {}).items():
        affine_sites[module[0]] |= any(of_layers)
        for layer, affine in enumerate(of_layers):
            flat += affine
            affine_at[0].extend([layer] * len(affine))
            affine_at[1].extend(range(first_affines[module], first_affines[module] + len(affine)))
    placed = place([len(tile) for tile in flat], chunk_bytes)
    units = placed.offsets // ALIGNMENT
    place_of[layers, columns, 0], place_of[layers, columns, 1] = placed.chunks[:rank_tiles], units[:rank_tiles]
    of_affines[affine_at] = np.column_stack(
        (np.ones_like(units[rank_tiles:]), placed.chunks[rank_tiles:], units[rank_tiles:])
    )
    chunks = _fill(flat, placed, chunk_bytes)
    return AdapterImage(chunks, entries, place_of, summary, of_affines, affine_sites, placed.used_bytes)


class TileTable:
    """The device table at its fixed address, and on the host what each slot holds, for whoever plans a step."""

    def __init__(
        self, geometry: Geometry, *, num_layers: int, num_slots: int, chunk_bytes: int, device: torch.device
    ) -> None:
        self.geometry = geometry
        self.stride = geometry.stride
        self.sites = tuple(SiteEntries.of(geometry, site) for site in range(len(geometry.sites)))
        self.entries: Tensor = torch.zeros(num_layers, num_slots * self.stride, dtype=torch.int64, device=device)
        self.affine_stride = geometry.affine_stride
        self.affines: Tensor = torch.zeros(num_layers, num_slots * self.affine_stride, dtype=torch.int64, device=device)
        self.affine_sites = np.zeros((num_slots, len(geometry.sites)), dtype=np.bool_)
        """By slot: at which sites the adapter has affines, in some layer."""
        self.summary = np.zeros((num_slots, len(geometry.modules()), 2), dtype=np.int32)
        """By slot and module: rank tiles in the layer with most of them, set of formats."""
        self.version = 0
        """Goes up with every change: what was planned under another version may not hold."""
        self._chunk_bytes = chunk_bytes

    def put(self, slot: int, image: AdapterImage, chunk_ids: Sequence[int]) -> None:
        """Name the slot's tiles; before a kernel reads them, the image's chunks lie in the arena's `chunk_ids`."""
        offsets = np.asarray(chunk_ids, dtype=np.int64) * (self._chunk_bytes // ALIGNMENT)
        where = np.zeros_like(image.entries)
        present = image.entries > 0
        where[present] = offsets[image.place_of[present, 0]] + image.place_of[present, 1]
        self._columns(slot).copy_(torch.from_numpy(where << 8 | image.entries))
        if image.affine_sites.any():
            there, chunks, units = (image.affines[..., column] for column in range(3))
            entries = np.where(there > 0, (offsets[chunks] + units) << 8 | there, 0)
            self._affine_columns(slot).copy_(torch.from_numpy(entries))
        self.affine_sites[slot] = image.affine_sites
        self.summary[slot] = image.summary
        self.version += 1

    def clear(self, slot: int) -> None:
        """Forget the slot's tiles."""
        self._columns(slot).zero_()
        if self.affine_sites[slot].any():
            self._affine_columns(slot).zero_()
        self.affine_sites[slot] = False
        self.summary[slot] = 0
        self.version += 1

    def _columns(self, slot: int) -> Tensor:
        return self.entries[:, slot * self.stride : (slot + 1) * self.stride]

    def _affine_columns(self, slot: int) -> Tensor:
        return self.affines[:, slot * self.affine_stride : (slot + 1) * self.affine_stride]


def _summary(by_layer: Sequence[tuple[RankTile, ...]]) -> tuple[int, int]:
    formats = {tile.format for ranks in by_layer for tile in ranks}
    return (max(map(len, by_layer), default=0), sum(1 << fmt for fmt in formats))


def _fill(tiles: Sequence[Bytes], placed: TilePlaces, chunk_bytes: int) -> NDArray[np.uint8]:
    chunks = np.zeros((placed.num_chunks, chunk_bytes), dtype=np.uint8)
    for tile, chunk, offset in zip(tiles, placed.chunks.tolist(), placed.offsets.tolist(), strict=True):
        chunks[chunk, offset : offset + len(tile)] = tile
    return chunks
