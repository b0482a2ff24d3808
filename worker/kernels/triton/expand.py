"""The second half, for decode and prefill alike: y (or delta) = B h, over all modules of a site in one launch.

One program computes up to ROWS rows of one group for GROUPS groups of 64 columns (the batch axis of `tl.dot`, dealt to
the warps). A remainder tile's line of 16 elements holds P columns of 16 / P rows: h is laid out block-diagonally, P
times, so that one product serves all P and lines are still read whole.
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
    arena_ptr, table_ptr, h_ptr, entry_at, cell, t, tiles, c, first_row, rows, TILE: tl.constexpr, RANGES,
    PARTS: tl.constexpr, GROUP_ROWS: tl.constexpr, ROWS: tl.constexpr, SIDE: tl.constexpr, FMT: tl.constexpr,
):
    """Find tiles t .. t + SIDE - 1 of TILE rows in format FMT: which there are, addresses, h [16 · SIDE, P · ROWS]."""
    s = tl.arange(0, 16 * SIDE)
    mine = t + s // 16
    entry = tl.load(table_ptr + entry_at + mine * RANGES + c, mask=mine < tiles, other=0)
    ok = (entry_rows(entry) == TILE) & (entry_format(entry) == FMT)
    q = tl.arange(0, 16 // TILE * ROWS)
    i = first_row + q % ROWS
    mask = ok[:, None] & (((s % 16) // TILE)[:, None] == (q // ROWS)[None, :]) & (i < rows)[None, :]
    h = tl.zeros((16 * SIDE, 16 // TILE * ROWS), tl.float32)
    at = h_ptr + ((cell + mine).to(tl.int64) * (PARTS * GROUP_ROWS * 16) + s % TILE)[:, None] + i[None, :] * 16
    for part in tl.static_range(PARTS):
        h += tl.load(at + part * (GROUP_ROWS * 16), mask=mask, other=0.0)
    return ok, arena_ptr + entry_offset(entry), h


@triton.jit
def _wide_product(
    arena_ptr, table_ptr, h_ptr, entry_at, cell, t, tiles, c, g, groups, first_row, rows, TILE: tl.constexpr, RANGES,
    PARTS: tl.constexpr, GROUP_ROWS: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, SIDE: tl.constexpr,
    FMT: tl.constexpr, ELEMENT: tl.constexpr, DOT: tl.constexpr, MAGIC: tl.constexpr,
):
    """Return B hᵀ [GROUPS, 64, ROWS] of the tiles t .. t + SIDE - 1 of TILE rows in the INT8 or 16-bit format FMT.

    g [GROUPS] numbers the column groups in their range c, which has `groups` of them.
    """
    P: tl.constexpr = 16 // TILE
    ok, tile, h = _inputs(
        arena_ptr, table_ptr, h_ptr, entry_at, cell, t, tiles, c, first_row, rows, TILE, RANGES,
        PARTS, GROUP_ROWS, ROWS, SIDE, FMT,
    )
    s = tl.arange(0, 16 * SIDE) % 16
    m = tl.arange(0, 64 // P)[None, :, None]
    line = tile.to(tl.pointer_type(ELEMENT))[None, None, :] + (g[:, None, None] * (64 // P) + m) * 16 + s[None, None, :]
    weights = tl.load(line, mask=ok[None, None, :] & (g < groups)[:, None, None], other=0)
    hs = tl.broadcast_to(h.to(DOT)[None, :, :], (GROUPS, 16 * SIDE, P * ROWS))
    y = tl.dot(operand(weights, DOT, MAGIC), hs)
    if P == 1:
        return y
    # [groups, half, line, plane, row] to columns as they lie in y
    y = tl.permute(tl.reshape(y, (GROUPS, 2, 32 // P, P, ROWS)), (0, 1, 3, 2, 4))
    return tl.reshape(y, (GROUPS, 64, ROWS))


@triton.jit
def _nibble_product(
    arena_ptr, table_ptr, h_ptr, entry_at, cell, t, tiles, c, g, groups, first_row, rows, TILE: tl.constexpr, RANGES,
    PARTS: tl.constexpr, GROUP_ROWS: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, SIDE: tl.constexpr,
    FMT: tl.constexpr, DOT: tl.constexpr,
):
    """As `_wide_product` for INT4, in the two halves that nibbles come in, [GROUPS, 32, ROWS] each.

    A scale belongs to a column group and a rank row, so it goes into that group's copy of h.
    """
    P: tl.constexpr = 16 // TILE
    ok, tile, h = _inputs(
        arena_ptr, table_ptr, h_ptr, entry_at, cell, t, tiles, c, first_row, rows, TILE, RANGES,
        PARTS, GROUP_ROWS, ROWS, SIDE, FMT,
    )
    s = tl.arange(0, 16 * SIDE) % 16
    m = tl.arange(0, 32 // P)[None, :, None]
    inside = ok[None, :] & (g < groups)[:, None]
    scale_at = (tile + groups * (32 * TILE)).to(tl.pointer_type(tl.bfloat16)) + s % TILE
    scale = tl.load(scale_at[None, :] + g[:, None] * TILE, mask=inside, other=0.0).to(tl.float32)
    hs = (h[None, :, :] * scale[:, :, None]).to(DOT)
    line = tile[None, None, :] + (g[:, None, None] * (32 // P) + m) * 16 + s[None, None, :]
    weights = tl.load(line, mask=ok[None, None, :] & (g < groups)[:, None, None], other=0x88)
    low, high = nibbles(weights, DOT)
    a = tl.dot(low, hs)
    b = tl.dot(high, hs)
    if P == 1:
        return a, b
    a = tl.permute(tl.reshape(a, (GROUPS, 32 // P, P, ROWS)), (0, 2, 1, 3))
    b = tl.permute(tl.reshape(b, (GROUPS, 32 // P, P, ROWS)), (0, 2, 1, 3))
    return tl.reshape(a, (GROUPS, 32, ROWS)), tl.reshape(b, (GROUPS, 32, ROWS))


@triton.jit
def _wide_tiles(
    acc, arena_ptr, table_ptr, h_ptr, entry_at, cell, tiles, most_full, least_full, c, g, groups, first_row, rows,
    RANGES, PARTS: tl.constexpr, GROUP_ROWS: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, SIDE: tl.constexpr,
    FMT: tl.constexpr, ELEMENT: tl.constexpr, DOT: tl.constexpr, MAGIC: tl.constexpr,
):
    """Add the products of all tiles of one INT8 or 16-bit format."""
    for t in tl.range(0, most_full, SIDE, num_stages=1):
        acc += _wide_product(
            arena_ptr, table_ptr, h_ptr, entry_at, cell, t, most_full, c, g, groups, first_row, rows, 16, RANGES,
            PARTS, GROUP_ROWS, ROWS, GROUPS, SIDE, FMT, ELEMENT, DOT, MAGIC,
        )
    for t in tl.range(least_full, tiles, num_stages=1):
        entry = tl.load(table_ptr + entry_at + t * RANGES + c)
        if entry_format(entry) == FMT:
            if entry_rows(entry) == 8:
                acc += _wide_product(
                    arena_ptr, table_ptr, h_ptr, entry_at, cell, t, tiles, c, g, groups, first_row, rows, 8, RANGES,
                    PARTS, GROUP_ROWS, ROWS, GROUPS, 1, FMT, ELEMENT, DOT, MAGIC,
                )
            if entry_rows(entry) == 4:
                acc += _wide_product(
                    arena_ptr, table_ptr, h_ptr, entry_at, cell, t, tiles, c, g, groups, first_row, rows, 4, RANGES,
                    PARTS, GROUP_ROWS, ROWS, GROUPS, 1, FMT, ELEMENT, DOT, MAGIC,
                )
    return acc


@triton.jit
def _nibble_tiles(
    acc, arena_ptr, table_ptr, h_ptr, entry_at, cell, tiles, most_full, least_full, c, g, groups, first_row, rows,
    RANGES, PARTS: tl.constexpr, GROUP_ROWS: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, SIDE: tl.constexpr,
    FMT: tl.constexpr, DOT: tl.constexpr,
):
    """Add the products of all INT4 tiles."""
    low = tl.zeros((GROUPS, 32, ROWS), tl.float32)
    high = tl.zeros((GROUPS, 32, ROWS), tl.float32)
    for t in tl.range(0, most_full, SIDE, num_stages=1):
        a, b = _nibble_product(
            arena_ptr, table_ptr, h_ptr, entry_at, cell, t, most_full, c, g, groups, first_row, rows, 16, RANGES,
            PARTS, GROUP_ROWS, ROWS, GROUPS, SIDE, FMT, DOT,
        )
        low += a
        high += b
    for t in tl.range(least_full, tiles, num_stages=1):
        entry = tl.load(table_ptr + entry_at + t * RANGES + c)
        if entry_format(entry) == FMT:
            if entry_rows(entry) == 8:
                a, b = _nibble_product(
                    arena_ptr, table_ptr, h_ptr, entry_at, cell, t, tiles, c, g, groups, first_row, rows, 8, RANGES,
                    PARTS, GROUP_ROWS, ROWS, GROUPS, 1, FMT, DOT,
                )
                low += a
                high += b
            if entry_rows(entry) == 4:
                a, b = _nibble_product(
                    arena_ptr, table_ptr, h_ptr, entry_at, cell, t, tiles, c, g, groups, first_row, rows, 4, RANGES,
                    PARTS, GROUP_ROWS, ROWS, GROUPS, 1, FMT, DOT,
                )
                low += a
                high += b
    both = tl.permute(tl.join(low, high), (0, 3, 1, 2))
    return acc + tl.reshape(both, (GROUPS, 64, ROWS))


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
        most_full = bits(span, 46, 6)
        least_full = bits(span, 52, 6)
        formats = bits(span, 58, 4)
        c = nb * BN // 1024
        g = (nb * GROUPS) % 16 + tl.arange(0, GROUPS)
        all_groups = (width + 63) // 64
        groups = tl.minimum(16, all_groups - c * 16)
        ranges = (width + 1023) // 1024
        acc = tl.zeros((GROUPS, 64, ROWS), tl.float32)
        if INT8:
            if formats & 2:
                acc = _wide_tiles(
                    acc, arena_ptr, table_ptr, h_ptr, entry_at, cell, tiles, most_full, least_full, c, g, groups,
                    first_row, rows, ranges, PARTS, GROUP_ROWS, ROWS, GROUPS, SIDE, FORMAT_INT8, tl.int8, DOT, MAGIC,
                )
        if BF16:
            if formats & 1:
                acc = _wide_tiles(
                    acc, arena_ptr, table_ptr, h_ptr, entry_at, cell, tiles, most_full, least_full, c, g, groups,
                    first_row, rows, ranges, PARTS, GROUP_ROWS, ROWS, GROUPS, SIDE, FORMAT_BF16, tl.bfloat16, DOT,
                    False,
                )
        if FP16:
            if formats & 8:
                acc = _wide_tiles(
                    acc, arena_ptr, table_ptr, h_ptr, entry_at, cell, tiles, most_full, least_full, c, g, groups,
                    first_row, rows, ranges, PARTS, GROUP_ROWS, ROWS, GROUPS, SIDE, FORMAT_FP16, tl.float16, DOT, False,
                )
        if INT4:
            if formats & 4:
                acc = _nibble_tiles(
                    acc, arena_ptr, table_ptr, h_ptr, entry_at, cell, tiles, most_full, least_full, c, g, groups,
                    first_row, rows, ranges, PARTS, GROUP_ROWS, ROWS, GROUPS, SIDE, FORMAT_INT4, DOT,
                )
        i = first_row + tl.arange(0, ROWS)
        live = (i < rows)[None, None, :]
        row = tl.load(order_ptr + start + i, mask=i < rows, other=0).to(tl.int64)
        n = (nb * GROUPS + tl.arange(0, GROUPS))[:, None, None] * 64 + tl.arange(0, 64)[None, :, None]
        y = y_ptr + row[None, None, :] * N + column + n
        if ADD:
            acc += tl.load(y, mask=live & (n < width), other=0.0).to(tl.float32)
        tl.store(y, acc.to(y_ptr.dtype.element_ty), mask=live & (n < width))
