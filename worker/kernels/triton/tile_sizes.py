"""What adapters weigh as tiles, before one is seen: how many chunks a file of so many bytes can need. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from worker.kernels.placing import SiteShape
from worker.kernels.triton.tiles import ALIGNMENT, GROUP, TILE_COLUMNS, TILE_ROWS, Format, rank_rows


def usable_chunk_bytes(sites: Sequence[SiteShape], chunk_bytes: int) -> int:
    """Return what `Placer` calls so; below 1 where chunks are too small for the base's tiles.

    All chunks but the last hold more than a chunk less the largest tile. Tiles weigh more than an adapter's file by
    scales and alignment, and for features that are no multiple of 64.
    """
    modules = {(site.in_features, width) for site in sites for width in site.widths}
    largest = max(_largest_tile(max(sizes)) for sizes in modules)
    growth = max(
        _tile_bytes(fmt, rank, sizes) / _file_bytes(fmt, rank, sizes)
        for sizes in modules
        for fmt in (Format.BF16, Format.INT8, Format.INT4)
        for rank in range(1, TILE_ROWS + 1)  # larger ones are made of these
    )
    growth = max(growth, *(-(-8 * out // ALIGNMENT) * ALIGNMENT / (8 * out) for _, out in modules))  # of affines
    return int((chunk_bytes // ALIGNMENT * ALIGNMENT - largest) / growth)


def aligned_factor_bytes(fmt: Format, rank: int, features: int, *, of_a: bool) -> list[int]:
    """Return what each tile of one factor takes in a chunk, as `tiles.cut` makes them of one part."""
    sizes = []
    for rows in rank_rows(rank):
        for first in range(0, features, TILE_COLUMNS):
            groups = -(-min(TILE_COLUMNS, features - first) // GROUP)
            if fmt is Format.INT4:
                size = rows * groups * (GROUP // 2 + 2)
            else:
                size = rows * groups * GROUP * (1 if fmt is Format.INT8 else 2) + (4 * rows if of_a else 0)
            sizes.append(-(-size // ALIGNMENT) * ALIGNMENT)
    return sizes


def _largest_tile(features: int) -> int:
    return max(max(aligned_factor_bytes(Format.BF16, TILE_ROWS, features, of_a=of_a)) for of_a in (True, False))


def _tile_bytes(fmt: Format, rank: int, sizes: tuple[int, int]) -> int:
    return sum(
        sum(aligned_factor_bytes(fmt, rank, features, of_a=of_a))
        for features, of_a in zip(sizes, (True, False), strict=True)
    )


def _file_bytes(fmt: Format, rank: int, sizes: tuple[int, int]) -> int:
    """Return the least that rank rows take in a packed file."""
    if fmt is Format.BF16:
        return 2 * rank * sum(sizes)
    if fmt is Format.INT8:
        return rank * (sum(sizes) + 4)
    return rank * sum(size // 2 + 2 * -(-size // GROUP) for size in sizes)
