"""What the LoRA kernels have to do in a step: planned once on the host, the same for every layer.

Rows of x are ordered by adapter and cut into groups of at most `group_rows` rows of one adapter. A *cell* is one group
and one rank tile of one module: a shrink kernel writes h of a cell, float32 [parts, group_rows, 16], and expand sums
the parts. Rows without an adapter are in no group, so they cost nothing.

Words of the tables (int64 pairs, a count of 0 is nothing to do):

    cells   entry of A's first column range | 0             and   first row of the group | rows << 32
    groups  entry of B | first cell << 32 (by slice)        and   first row | rows << 32 | tiles << 40
                                                                  | formats << 46
    blocks  first cell | cells << 32                        and   first row | rows << 32   (prefill: cells side by side)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.kernels.triton.directory import Geometry, TileTable
from worker.kernels.triton.staging import Staged, send

Words = NDArray[np.int64]

DECODE_GROUP_ROWS: Final = 8
"""A tensor core's least number of columns: up to here a row more costs no instruction."""
PREFILL_GROUP_ROWS: Final = 64
BLOCK_CELLS: Final = 4
"""Rank tiles that one prefill program computes side by side, over one reading of x."""


@dataclass(frozen=True, slots=True)
class SiteWork:
    """One site's part of a step, on the host or on the device."""

    cells: Tensor
    """[cells, 2] int64."""
    groups: Tensor
    """[groups, slices, 2] int64."""
    blocks: Tensor
    """[blocks, 2] int64."""
    adapted: Tensor
    """[T] int32: 1 for rows whose adapter attaches here, whose delta row expand writes."""


@dataclass(frozen=True, slots=True)
class AffineWork:
    """Which rows of a step have affines, on the host or on the device; by site, as only some sites may have any."""

    rows: tuple[Tensor, ...]
    """[T] int32 by site: the slot of rows whose adapter has affines there, in some layer; -1."""
    rest: tuple[Tensor, ...]
    """[T] int32 by site: `SiteWork.adapted` without those, whose delta is added with the affine."""
    sites: tuple[bool, ...]
    """Whether any row has one."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """All sites' work, and the order of rows that it counts in."""

    order: Tensor
    """[rows with an adapter] int32: the row of x at each place of the order."""
    sites: tuple[SiteWork, ...]
    group_rows: int


def plan_work(slots: NDArray[np.int64], table: TileTable, *, group_rows: int) -> StepWork:
    """Plan a step over rows with adapters in `slots` [T], -1 for none; tensors are on the CPU.

    Give decode rows and prefill rows each a plan of their own (the other's slots as -1): then a row's kernel, and so
    its result, does not depend on what shares the step.
    """
    order = np.argsort(slots, kind="stable")
    order = order[slots[order] >= 0]
    ordered = slots[order]
    starts, counts = _groups(ordered, group_rows)
    group_slots = ordered[starts].astype(np.int64)
    sites = tuple(_site(site, table, group_slots, starts, counts, slots) for site in range(len(table.sites)))
    return StepWork(torch.from_numpy(order.astype(np.int32)), sites, group_rows)


def plan_affines(slots: NDArray[np.int64], table: TileTable, adapted: Sequence[Tensor]) -> AffineWork | None:
    """Plan the affines of rows with adapters in `slots` [T], -1 for none; `adapted` counts the rows by site.

    None where no row has any. Tensors are on the CPU.
    """
    there = table.affine_sites[slots] & (slots >= 0)[:, None]
    if not there.any():
        return None
    rows = tuple(torch.from_numpy(np.where(here, slots, -1).astype(np.int32)) for here in there.T)
    rest = tuple(
        torch.from_numpy(np.where(here, 0, of_site.numpy()).astype(np.int32))
        for here, of_site in zip(there.T, adapted, strict=True)
    )
    return AffineWork(rows, rest, tuple(bool(here.any()) for here in there.T))


def _groups(ordered: NDArray[np.int64], group_rows: int) -> tuple[Words, Words]:
    """First row and number of rows of every group."""
    if not len(ordered):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    runs = np.flatnonzero(np.diff(ordered, prepend=-1))
    lengths = np.diff(np.append(runs, len(ordered)))
    per_run = -(-lengths // group_rows)
    within = np.arange(per_run.sum()) - np.repeat(np.cumsum(per_run) - per_run, per_run)
    starts = np.repeat(runs, per_run) + within * group_rows
    return starts, np.minimum(group_rows, np.repeat(runs + lengths, per_run) - starts)


def _site(
    site: int, table: TileTable, group_slots: Words, starts: Words, counts: Words, slots: NDArray[np.int64]
) -> SiteWork:
    entries = table.sites[site]
    modules = entries.modules
    attached: NDArray[np.bool_] = (table.summary[:, modules, 0] > 0).max(axis=1)
    here = attached[group_slots]
    group_slots, starts, counts = group_slots[here], starts[here], counts[here]
    summary = table.summary[group_slots][:, modules].astype(np.int64)  # [groups, slices, 2]
    tiles = summary[:, :, 0]
    first_cell = np.cumsum(tiles.reshape(-1)).reshape(tiles.shape) - tiles
    rows = starts | counts << 32
    groups = np.empty((len(starts), len(modules), 2), dtype=np.int64)
    groups[:, :, 0] = (group_slots[:, None] * table.stride + entries.first_b) | first_cell << 32
    groups[:, :, 1] = rows[:, None] | tiles << 40 | summary[:, :, 1] << 46
    flat = tiles.reshape(-1)
    within = np.arange(flat.sum()) - np.repeat(np.cumsum(flat) - flat, flat)
    cells = np.empty((int(flat.sum()), 2), dtype=np.int64)
    entry = (group_slots[:, None] * table.stride + entries.first_a).reshape(-1)
    cells[:, 0] = np.repeat(entry, flat) + within * entries.ranges_a
    cells[:, 1] = np.repeat(np.repeat(rows, len(modules)), flat)
    adapted = np.where(slots >= 0, attached[slots], False)
    return SiteWork(
        torch.from_numpy(cells),
        torch.from_numpy(groups),
        torch.from_numpy(_blocks(tiles.sum(axis=1), rows)),
        torch.from_numpy(adapted.astype(np.int32)),
    )


def _blocks(cells: Words, rows: Words) -> Words:
    """Cut every group's cells, whatever their slices, into blocks of at most BLOCK_CELLS."""
    per_group = -(-cells // BLOCK_CELLS)
    within = np.arange(per_group.sum()) - np.repeat(np.cumsum(per_group) - per_group, per_group)
    first = np.repeat(np.cumsum(cells) - cells, per_group) + within * BLOCK_CELLS
    here = np.minimum(BLOCK_CELLS, np.repeat(cells, per_group) - within * BLOCK_CELLS)
    out = np.empty((len(first), 2), dtype=np.int64)
    out[:, 0] = first | here << 32
    out[:, 1] = np.repeat(rows, per_group)
    return out


def to_device(work: StepWork, device: torch.device) -> StepWork:
    """Copy a plan to the device in one transfer."""
    return from_tensors(send(tensors_of(work), device), work.group_rows)


class FixedWork:
    """A plan's place on the device for steps of up to `rows` rows: what a captured graph reads, filled for each step.

    `work` is as large as can be needed with `max_tiles` rank tiles a module; what a step does not use counts 0 rows, at
    which kernels return. Graphs of several sizes keep that little.
    """

    def __init__(self, geometry: Geometry, *, rows: int, max_tiles: int, group_rows: int, device: torch.device) -> None:
        shapes: list[tuple[tuple[int, ...], torch.dtype]] = [((rows,), torch.int32)]
        for site in geometry.sites:
            modules = len(site.widths)
            shapes += [((rows * modules * max_tiles, 2), torch.int64), ((rows, modules, 2), torch.int64)]
            shapes += [((rows * _blocks_at_most(modules, max_tiles), 2), torch.int64), ((rows,), torch.int32)]
        self._staged = Staged(shapes, device)
        self.work = from_tensors(self._staged.tensors, group_rows)

    def fill(self, plan: StepWork) -> None:
        """Copy a plan on the current stream. Raises ValueError for one too large."""
        tensors = tensors_of(plan)
        for place, tensor in zip(self._staged.tensors, tensors, strict=True):
            if len(tensor) > len(place):
                raise ValueError(f"a plan with {len(tensor)} entries does not fit the {len(place)} there is room for")
        for array, tensor in zip(self._staged.blank(), tensors, strict=True):
            array[: len(tensor)] = tensor.numpy()
        self._staged.copy()


def tiles_needed(plan: StepWork, rows: int) -> int:
    """Return the least `max_tiles` with which a FixedWork of so many rows has room for a plan of as many or fewer."""
    needed = 1
    for site in plan.sites:
        modules = site.groups.shape[1]
        needed = max(needed, -(-len(site.cells) // (rows * modules)))
        while len(site.blocks) > rows * _blocks_at_most(modules, needed):
            needed += 1
    return needed


def tensors_of(work: StepWork) -> list[Tensor]:
    """Return a plan's tensors in a fixed order."""
    return [work.order, *(t for site in work.sites for t in (site.cells, site.groups, site.blocks, site.adapted))]


def from_tensors(tensors: Sequence[Tensor], group_rows: int) -> StepWork:
    """Return the plan of such tensors."""
    sites = tuple(SiteWork(*tensors[first : first + 4]) for first in range(1, len(tensors), 4))
    return StepWork(tensors[0], sites, group_rows)


def _blocks_at_most(modules: int, max_tiles: int) -> int:
    """Blocks of one group."""
    return -(-modules * max_tiles // BLOCK_CELLS)
