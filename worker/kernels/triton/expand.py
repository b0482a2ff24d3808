"""The second half, for decode and prefill alike: y (or delta) = B h, over all modules of a site in one launch.

One program computes up to ROWS rows of one group for GROUPS groups of 64 columns (the batch axis of `tl.dot`, dealt to
the warps). B lies with columns innermost, as read: lanes of rank rows that a tile does not have read nothing, and the
operand is turned on its way through shared memory, which it takes anyway.
"""

import triton
import triton.language as tl

from worker.kernels.triton.elements import (
    FORMAT_BF16,
    FORMAT_FP16,
    FORMAT_INT4,
    FORMAT_INT8,
    bits,
    entry_format,
    entry_offset,
    entry_rows,
    low_word,
    nibbles,
    operand,
)

# Kernels have many arguments: one a line would hide the code.
# fmt: off

@triton.jit
def _inputs(
    arena_ptr, table_ptr, h_ptr, entry_at, cell, t, tiles, c, first_row, rows, RANGES,
    PARTS: tl.constexpr, GROUP_ROWS: tl.constexpr, ROWS: tl.constexpr, SIDE: tl.constexpr, FMT: tl.constexpr,
):
    """Find the rank rows of tiles t .. t + SIDE - 1 in format FMT.

    Returns h [16 · SIDE, ROWS] and, [16 · SIDE] each, which rows there are, their tiles' addresses and numbers of rows.
    """
    s = tl.arange(0, 16 * SIDE)
    mine = t + s // 16
    entry = tl.load(table_ptr + entry_at + mine * RANGES + c, mask=mine < tiles, other=0)
    tile_rows = entry_rows(entry)
    ok = (s % 16 < tile_rows) & (entry_format(entry) == FMT)
    i = first_row + tl.arange(0, ROWS)
    mask = ok[:, None] & (i < rows)[None, :]
    h = tl.zeros((16 * SIDE, ROWS), tl.float32)
    at = h_ptr + ((cell + mine).to(tl.int64) * (PARTS * GROUP_ROWS * 16) + s % 16)[:, None] + i[None, :] * 16
    for part in tl.static_range(PARTS):
        h += tl.load(at + part * (GROUP_ROWS * 16), mask=mask, other=0.0)
    return h, ok, arena_ptr + entry_offset(entry), tile_rows


@triton.jit
def _wide_tiles(
    acc, arena_ptr, table_ptr, h_ptr, entry_at, cell, tiles, c, g, groups, first_row, rows,
    RANGES, PARTS: tl.constexpr, GROUP_ROWS: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, SIDE: tl.constexpr,
    FMT: tl.constexpr, ELEMENT: tl.constexpr, DOT: tl.constexpr, MAGIC: tl.constexpr,
):
    """Add B hᵀ [GROUPS, 64, ROWS] of all tiles in the INT8 or 16-bit format FMT, SIDE at a time.

    g [GROUPS] numbers the column groups in their range c, which has `groups` of them.
    """
    s = tl.arange(0, 16 * SIDE) % 16
    j = tl.arange(0, 64)[None, None, :]
    for t in tl.range(0, tiles, SIDE, num_stages=1):
        h, ok, tile, _ = _inputs(
            arena_ptr, table_ptr, h_ptr, entry_at, cell, t, tiles, c, first_row, rows, RANGES,
            PARTS, GROUP_ROWS, ROWS, SIDE, FMT,
        )
        at = tile.to(tl.pointer_type(ELEMENT))[None, :, None] + (s * (groups * 64))[None, :, None]
        inside = ok[None, :, None] & (g < groups)[:, None, None]
        weights = tl.load(at + g[:, None, None] * 64 + j, mask=inside, other=0)
        hs = tl.broadcast_to(h.to(DOT)[None, :, :], (GROUPS, 16 * SIDE, ROWS))
        acc += tl.dot(tl.permute(operand(weights, DOT, MAGIC), (0, 2, 1)), hs)
    return acc


@triton.jit
def _nibble_tiles(
    arena_ptr, table_ptr, h_ptr, entry_at, cell, tiles, c, g, groups, first_row, rows, RANGES,
    PARTS: tl.constexpr, GROUP_ROWS: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, SIDE: tl.constexpr,
    FMT: tl.constexpr, DOT: tl.constexpr,
):
    """Return what `_wide_tiles` adds, for INT4, summed in the two halves that nibbles come in.

    A scale belongs to a column group and a rank row, so it goes into that group's copy of h.
    """
    s = tl.arange(0, 16 * SIDE) % 16
    j = tl.arange(0, 32)[None, None, :]
    low = tl.zeros((GROUPS, 32, ROWS), tl.float32)
    high = tl.zeros((GROUPS, 32, ROWS), tl.float32)
    for t in tl.range(0, tiles, SIDE, num_stages=1):
        h, ok, tile, tile_rows = _inputs(
            arena_ptr, table_ptr, h_ptr, entry_at, cell, t, tiles, c, first_row, rows, RANGES,
            PARTS, GROUP_ROWS, ROWS, SIDE, FMT,
        )
        scale_at = (tile + tile_rows * (groups * 32)).to(tl.pointer_type(tl.bfloat16)) + s
        inside = ok[None, :] & (g < groups)[:, None]
        scale = tl.load(scale_at[None, :] + g[:, None] * tile_rows[None, :], mask=inside, other=0.0).to(tl.float32)
        hs = (h[None, :, :] * scale[:, :, None]).to(DOT)
        at = (tile + s * (groups * 32))[None, :, None] + g[:, None, None] * 32 + j
        weights = tl.load(at, mask=inside[:, :, None], other=0x88)
        w_low, w_high = nibbles(weights, DOT)
        low += tl.dot(tl.permute(w_low, (0, 2, 1)), hs)
        high += tl.dot(tl.permute(w_high, (0, 2, 1)), hs)
    both = tl.permute(tl.join(low, high), (0, 3, 1, 2))
    return tl.reshape(both, (GROUPS, 64, ROWS))


@triton.jit
def expand_kernel(
    y_ptr, arena_ptr, table_ptr, groups_ptr, order_ptr, h_ptr,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, SLICES: tl.constexpr, PARTS: tl.constexpr,
    GROUP_ROWS: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, SIDE: tl.constexpr,
    BF16: tl.constexpr, FP16: tl.constexpr, INT8: tl.constexpr, INT4: tl.constexpr, ADD: tl.constexpr,
    DOT: tl.constexpr, MAGIC: tl.constexpr,
):
    """Compute y[row, first(slice) + n] = or += Σ_{t, r} B[slice, t][n, r] · Σ_part h[cell(slice, t), part, i, r].

    Grid (groups, Σ ⌈N / (64 · GROUPS)⌉, GROUP_ROWS / ROWS). y [T, N0 + N1 + N2] 16-bit, in place; without ADD every
    column of every row of a group is written, zeros where the adapter has no module. h as shrink_kernel writes it. SIDE
    tiles are multiplied as one. num_warps must divide GROUPS.
    """
    BN: tl.constexpr = 64 * GROUPS
    C0: tl.constexpr = (N0 + BN - 1) // BN
    C1: tl.constexpr = (N1 + BN - 1) // BN
    N: tl.constexpr = N0 + N1 + N2
    nb = tl.program_id(1)
    part_of_site = 0
    column = 0
    width = N0
    if nb >= C0 + C1:
        part_of_site = 2
        column = N0 + N1
        width = N2
        nb -= C0 + C1
    elif nb >= C0:
        part_of_site = 1
        column = N0
        width = N1
        nb -= C0
    word = groups_ptr + (tl.program_id(0) * SLICES + part_of_site) * 2
    span = tl.load(word + 1)
    rows = bits(span, 32, 8)
    tiles = bits(span, 40, 6)
    if ADD:
        rows = tl.where(tiles > 0, rows, 0)
    first_row = tl.program_id(2) * ROWS
    if rows > first_row:
        at = tl.load(word)
        entry_at = low_word(at)
        cell = low_word(at >> 32)
        start = low_word(span)
        formats = bits(span, 46, 4)
        c = nb * BN // 1024
        g = (nb * GROUPS) % 16 + tl.arange(0, GROUPS)
        all_groups = (width + 63) // 64
        groups = tl.minimum(16, all_groups - c * 16)
        ranges = (width + 1023) // 1024
        acc = tl.zeros((GROUPS, 64, ROWS), tl.float32)
        if INT4:  # first, as its two halves are more sums to hold
            if formats & 4:
                acc = _nibble_tiles(
                    arena_ptr, table_ptr, h_ptr, entry_at, cell, tiles, c, g, groups, first_row, rows, ranges,
                    PARTS, GROUP_ROWS, ROWS, GROUPS, SIDE, FORMAT_INT4, DOT,
                )
        if INT8:
            if formats & 2:
                acc = _wide_tiles(
                    acc, arena_ptr, table_ptr, h_ptr, entry_at, cell, tiles, c, g, groups,
                    first_row, rows, ranges, PARTS, GROUP_ROWS, ROWS, GROUPS, SIDE, FORMAT_INT8, tl.int8, DOT, MAGIC,
                )
        if BF16:
            if formats & 1:
                acc = _wide_tiles(
                    acc, arena_ptr, table_ptr, h_ptr, entry_at, cell, tiles, c, g, groups,
                    first_row, rows, ranges, PARTS, GROUP_ROWS, ROWS, GROUPS, SIDE, FORMAT_BF16, tl.bfloat16, DOT,
                    False,
                )
        if FP16:
            if formats & 8:
                acc = _wide_tiles(
                    acc, arena_ptr, table_ptr, h_ptr, entry_at, cell, tiles, c, g, groups,
                    first_row, rows, ranges, PARTS, GROUP_ROWS, ROWS, GROUPS, SIDE, FORMAT_FP16, tl.float16, DOT, False,
                )
        i = first_row + tl.arange(0, ROWS)
        live = (i < rows)[None, None, :]
        row = tl.load(order_ptr + start + i, mask=i < rows, other=0).to(tl.int64)
        n = (nb * GROUPS + tl.arange(0, GROUPS))[:, None, None] * 64 + tl.arange(0, 64)[None, :, None]
        y = y_ptr + row[None, None, :] * N + column + n
        if ADD:
            acc += tl.load(y, mask=live & (n < width), other=0.0).to(tl.float32)
        tl.store(y, acc.to(y_ptr.dtype.element_ty), mask=live & (n < width))
