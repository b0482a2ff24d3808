"""The LoRA operators as functions of torch tensors: what a backend calls.

The order of a site in a step is `shrink` beside the base's product (a side stream may run it, and `expand` without
`add`, while the base computes), then either `expand(..., add=True)` into the product, or `expand` into a delta buffer
that the next kernel (rope, add_norm, silu_mul) adds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from worker.kernels.triton.directory import Geometry, TileTable
from worker.kernels.triton.expand import expand_kernel
from worker.kernels.triton.platform import COMPILE, Platform, power_of_2
from worker.kernels.triton.pointwise import affine_kernel
from worker.kernels.triton.prefill import prefill_shrink_kernel
from worker.kernels.triton.shrink import shrink_kernel
from worker.kernels.triton.tiles import GROUP, TILE_COLUMNS, Format
from worker.kernels.triton.work import BLOCK_CELLS, DECODE_GROUP_ROWS, StepWork

ALL_FORMATS: Final = frozenset(Format)
_MOST_PARTS: Final = 4
_SHRINK_WARPS: Final = 4
_EXPAND_GROUPS: Final = 4
_EXPAND_WARPS: Final = 2
_EXPAND_ROWS: Final = 8  # with 16 the kernel of all formats spills registers


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """What the kernels are compiled for; the same for all steps, so that no result depends on a step."""

    geometry: Geometry
    platform: Platform
    formats: frozenset[Format] = ALL_FORMATS
    """Formats that occur; the others' code is left out."""

    @property
    def constants(self) -> dict[str, Any]:
        """Compile-time arguments that all kernels share."""
        return {
            **{fmt.name: fmt in self.formats for fmt in Format},
            "DOT": self.platform.dot,
            "MAGIC": self.platform.slow_int8,
        }

    def side(self, group_rows: int) -> int:
        """Rank tiles that expand multiplies as one; prefill, whose time goes elsewhere, spends registers on none."""
        if group_rows > DECODE_GROUP_ROWS:
            return 1
        return min(2, power_of_2(max(1, self.geometry.max_rank // 16)))

    def ranges_per_part(self, site: int) -> int:
        """Column ranges of A that one shrink program sums; the parts are what expand sums."""
        return -(-self.geometry.ranges(site, 0, 0) // _MOST_PARTS)

    def parts(self, site: int, group_rows: int) -> int:
        """Parts of h at a site."""
        if group_rows > DECODE_GROUP_ROWS:
            return 1
        return -(-self.geometry.ranges(site, 0, 0) // self.ranges_per_part(site))

    def h_shape(self, site: int, group_rows: int, cells: int) -> tuple[int, int, int, int]:
        """Shape of the float32 buffer between shrink and expand."""
        return (cells, self.parts(site, group_rows), group_rows, 16)


def shrink(config: LoraConfig, site: int, x: Tensor, arena: Tensor, entries: Tensor, work: StepWork, h: Tensor) -> None:
    """Compute h = scale · A x for every cell of the work, written in place.

    x [T, K] contiguous, 16-bit; arena uint8 bytes; entries [slots · stride] int64, one layer of TileTable.entries;
    h float32, room for `config.h_shape(site, work.group_rows, number of cells)`.
    """
    todo = work.sites[site]
    shape = config.geometry.sites[site]
    features, ranges = shape.in_features, config.geometry.ranges(site, 0, 0)
    if not len(todo.cells):
        return
    if work.group_rows > DECODE_GROUP_ROWS:
        prefill_shrink_kernel[(len(todo.blocks),)](
            x, arena, entries, todo.cells, todo.blocks, work.order, h,
            K=features, RANGES=ranges, GROUP_ROWS=work.group_rows, SIDE=BLOCK_CELLS, BK=GROUP,
            STAGES=config.platform.stages, num_warps=4, **config.constants, **COMPILE,
        )  # fmt: skip
        return
    shrink_kernel[(len(todo.cells), config.parts(site, work.group_rows))](
        x, arena, entries, todo.cells, work.order, h,
        K=features, KT=min(TILE_COLUMNS, max(GROUP, power_of_2(features))), RANGES=ranges,
        RANGES_PER_PART=config.ranges_per_part(site), PARTS=config.parts(site, work.group_rows),
        GROUP_ROWS=work.group_rows, WARPS=_SHRINK_WARPS, num_warps=_SHRINK_WARPS, **config.constants,
        **COMPILE,
    )  # fmt: skip


def expand(
    config: LoraConfig, site: int, y: Tensor, arena: Tensor, entries: Tensor, work: StepWork, h: Tensor, *, add: bool
) -> None:
    """Compute y[row] = or += B h of the row's adapter, in place; rows without an adapter at this site are left alone.

    y [T, sum of the site's widths] contiguous, 16-bit: the base's product (add), or a delta buffer, of which every row
    with `adapted` is written whole.
    """
    todo = work.sites[site]
    widths = config.geometry.sites[site].widths
    if not len(todo.groups):
        return
    columns = GROUP * _EXPAND_GROUPS
    rows = min(work.group_rows, _EXPAND_ROWS)
    padded = (*widths, 0, 0)[:3]
    expand_kernel[(len(todo.groups), sum(-(-width // columns) for width in widths), work.group_rows // rows)](
        y, arena, entries, todo.groups, work.order, h,
        N0=padded[0], N1=padded[1], N2=padded[2], SLICES=len(widths), PARTS=config.parts(site, work.group_rows),
        GROUP_ROWS=work.group_rows, ROWS=rows, GROUPS=_EXPAND_GROUPS, SIDE=config.side(work.group_rows), ADD=add,
        num_warps=_EXPAND_WARPS,         **config.constants, **COMPILE,
    )  # fmt: skip


def scale_and_shift(
    table: TileTable, layer: int, site: int, y: Tensor, delta: Tensor, arena: Tensor, rows: Tensor
) -> None:
    """Compute y[t] = scale · (y[t] + delta[t]) + shift in place, for rows whose adapter has affines at the site.

    y and delta [T, sum of the site's widths] contiguous, 16-bit; rows [T] int32, the adapter's slot or -1.
    """
    geometry = table.geometry
    widths = geometry.sites[site].widths
    padded = (*widths, 0, 0)[:3]
    affine_kernel[(len(y), sum(-(-width // TILE_COLUMNS) for width in widths))](
        y, delta, rows, arena, table.affines[layer], N0=padded[0], N1=padded[1], N2=padded[2],
        STRIDE=table.affine_stride, FIRST=geometry.affine_bases()[site, 0], COLUMNS=TILE_COLUMNS, num_warps=4,
        **COMPILE,
    )  # fmt: skip


def allocate_h(config: LoraConfig, work: StepWork, device: torch.device) -> Tensor:
    """Return a buffer between shrink and expand that is large enough for every site of the work."""
    sizes = [
        int(torch.Size(config.h_shape(site, work.group_rows, len(todo.cells))).numel())
        for site, todo in enumerate(work.sites)
    ]
    return torch.empty(max(sizes, default=0), dtype=torch.float32, device=device)
