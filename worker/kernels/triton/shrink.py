"""Decode's first half: h = scale · A x for a few rows of each adapter. BGMV over rank tiles (Punica, arXiv 2310.18547).

One program computes one cell over one part of the columns: it reads its tile once, all of it at the same time, with the
columns dealt to the warps as the batch axis of `tl.dot`. Parts are cut by columns alone, and nothing is added across
programs, so a row's result depends on no other row.
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
def _wide_tile(
    x_ptr, tile, rows, row, live, scale_at, width, k0, K: tl.constexpr, KT: tl.constexpr, WARPS: tl.constexpr,
    DOT: tl.constexpr, MAGIC: tl.constexpr,
):
    """Return [WARPS, 16, GROUP_ROWS] partial sums of an INT8 or 16-bit tile, scaled. `tile` points to its elements."""
    BK: tl.constexpr = KT // WARPS
    r = tl.arange(0, 16)
    k = tl.arange(0, WARPS)[:, None, None] * BK + tl.arange(0, BK)[None, None, :]
    # k < width everywhere but in the last tile; columns beyond K are zeros there
    w = tl.load(tile + r[None, :, None] * width + k, mask=(r < rows)[None, :, None] & (k < width), other=0)
    x = tl.load(x_ptr + row[None, :, None] * K + k0 + k, mask=live[None, :, None] & (k0 + k < K), other=0.0)
    scale = tl.load(scale_at + r, mask=r < rows, other=0.0)
    return tl.dot(operand(w, DOT, MAGIC), tl.permute(x.to(DOT), (0, 2, 1))) * scale[None, :, None]


@triton.jit
def _nibble_tile(
    x_ptr, tile, rows, row, live, width, k0, K: tl.constexpr, KT: tl.constexpr, WARPS: tl.constexpr,
    GROUP_ROWS: tl.constexpr, DOT: tl.constexpr,
):
    """As `_wide_tile` for INT4: a warp takes a group of 64 columns at a time, whose scale it applies to the sum."""
    r = tl.arange(0, 16)
    j = tl.arange(0, 32)[None, None, :]
    scale_at = (tile + rows * (width // 2)).to(tl.pointer_type(tl.bfloat16))
    acc = tl.zeros((WARPS, 16, GROUP_ROWS), tl.float32)
    for step in tl.static_range((KT // 64 + WARPS - 1) // WARPS):
        group = step * WARPS + tl.arange(0, WARPS)
        inside = (r < rows)[None, :, None] & (group * 64 < width)[:, None, None]
        w = tl.load(tile + r[None, :, None] * (width // 2) + group[:, None, None] * 32 + j, mask=inside, other=0x88)
        k = k0 + group[:, None, None] * 64 + j
        at = x_ptr + row[None, :, None] * K + k
        x_low = tl.load(at, mask=live[None, :, None] & (k < K), other=0.0)
        x_high = tl.load(at + 32, mask=live[None, :, None] & (k + 32 < K), other=0.0)
        scale = tl.load(
            scale_at + group[:, None] * rows + r[None, :],
            mask=(r < rows)[None, :] & (group * 64 < width)[:, None],
            other=0.0,
        ).to(tl.float32)
        low, high = nibbles(w, DOT)
        part = tl.dot(low, tl.permute(x_low.to(DOT), (0, 2, 1)))
        part = tl.dot(high, tl.permute(x_high.to(DOT), (0, 2, 1)), part)
        acc += part * scale[:, :, None]
    return acc


@triton.jit
def shrink_kernel(
    x_ptr, arena_ptr, table_ptr, cells_ptr, order_ptr, h_ptr,
    K: tl.constexpr, KT: tl.constexpr, RANGES: tl.constexpr, RANGES_PER_PART: tl.constexpr, PARTS: tl.constexpr,
    GROUP_ROWS: tl.constexpr, WARPS: tl.constexpr,
    BF16: tl.constexpr, FP16: tl.constexpr, INT8: tl.constexpr, INT4: tl.constexpr, DOT: tl.constexpr,
    MAGIC: tl.constexpr,
):
    """Compute h[cell, part, i, r] = Σ_{k of part} scale[r] · A[r, k] · x[order[start + i], k].   Grid (cells, PARTS).

    x [T, K] 16-bit; arena bytes; table int64, one layer's; h [cells, PARTS, GROUP_ROWS, 16] float32, written for the
    rows a cell has and the rank rows its tile has. num_warps must be WARPS. BF16 to INT4 say
    which formats are compiled in.
    """
    cell = tl.program_id(0)
    part = tl.program_id(1)
    span = tl.load(cells_ptr + 2 * cell + 1)
    count = bits(span, 32, 8)
    if count > 0:
        first = low_word(tl.load(cells_ptr + 2 * cell))
        start = low_word(span)
        i = tl.arange(0, GROUP_ROWS)
        live = i < count
        row = tl.load(order_ptr + start + i, mask=live, other=0).to(tl.int64)
        acc = tl.zeros((WARPS, 16, GROUP_ROWS), tl.float32)
        most = 0
        for n in tl.static_range(RANGES_PER_PART):
            c = part * RANGES_PER_PART + n
            entry = tl.load(table_ptr + first + c, mask=c < RANGES, other=0)
            rows = entry_rows(entry)
            fmt = entry_format(entry)
            tile = arena_ptr + entry_offset(entry)
            # a product, so that the compiler sees a multiple of 64
            width = tl.minimum(16, (K + 63) // 64 - c * 16) * 64
            k0 = c * 1024
            most = tl.maximum(most, rows)
            if rows > 0:
                if INT8:
                    if fmt == FORMAT_INT8:
                        acc += _wide_tile(
                            x_ptr, tile.to(tl.pointer_type(tl.int8)), rows, row, live,
                            (tile + rows * width).to(tl.pointer_type(tl.float32)),
                            width, k0, K, KT, WARPS, DOT, MAGIC,
                        )
                if BF16:
                    if fmt == FORMAT_BF16:
                        acc += _wide_tile(
                            x_ptr, tile.to(tl.pointer_type(tl.bfloat16)), rows, row, live,
                            (tile + rows * width * 2).to(tl.pointer_type(tl.float32)),
                            width, k0, K, KT, WARPS, DOT, False,
                        )
                if FP16:
                    if fmt == FORMAT_FP16:
                        acc += _wide_tile(
                            x_ptr, tile.to(tl.pointer_type(tl.float16)), rows, row, live,
                            (tile + rows * width * 2).to(tl.pointer_type(tl.float32)),
                            width, k0, K, KT, WARPS, DOT, False,
                        )
                if INT4:
                    if fmt == FORMAT_INT4:
                        acc += _nibble_tile(x_ptr, tile, rows, row, live, width, k0, K, KT, WARPS, GROUP_ROWS, DOT)
        h = tl.sum(acc, 0)
        r = tl.arange(0, 16)
        at = h_ptr + (cell.to(tl.int64) * PARTS + part) * (GROUP_ROWS * 16)
        tl.store(at + i[None, :] * 16 + r[:, None], h, mask=live[None, :] & (r < most)[:, None])
