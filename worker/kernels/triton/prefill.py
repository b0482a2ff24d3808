"""Prefill's first half: h = scale · A x for up to 64 rows of one adapter, on tensor cores. SGMV (Punica).

One program computes up to SIDE cells of one group, whichever modules of the site they belong to, over one reading of x.
`expand` does the second half for prefill too.
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
def _wide_range(
    acc, x_at, x_live, tile, ok, r, units, k0, K: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    DOT: tl.constexpr, MAGIC: tl.constexpr,
):
    """Compute acc [16 · SIDE, GROUP_ROWS] += A xᵀ over one column range; `tile` points to each row's tile's elements.

    The weights are read one step ahead in registers: through the compiler's asynchronous copies they would go in
    pieces of 8 bytes, being laid out in shared memory for the operand they become.
    """
    j = tl.arange(0, BK)
    a_at = tile[:, None] + (r * (units * 64))[:, None] + j[None, :]
    w = tl.load(a_at, mask=ok[:, None] & (j < units * 64)[None, :], other=0)
    for k in tl.range(0, units * 64, BK, num_stages=STAGES):
        ahead = k + BK + j
        w_ahead = tl.load(a_at + (k + BK), mask=ok[:, None] & (ahead < units * 64)[None, :], other=0)
        x = tl.load(x_at[:, None] + (k0 + k + j)[None, :], mask=x_live[:, None] & (k0 + k + j < K)[None, :], other=0.0)
        acc = tl.dot(operand(w, DOT, MAGIC), tl.trans(x.to(DOT)), acc)
        w = w_ahead
    return acc


@triton.jit
def _nibble_range(
    acc, x_at, x_live, tile, ok, r, rows, units, k0, K: tl.constexpr, STAGES: tl.constexpr, DOT: tl.constexpr
):
    """As `_wide_range` for INT4, a group of 64 columns at a time."""
    j = tl.arange(0, 32)
    a_at = tile[:, None] + (r * (units * 32))[:, None] + j[None, :]
    scale_at = (tile + rows * (units * 32)).to(tl.pointer_type(tl.bfloat16)) + r
    w = tl.load(a_at, mask=ok[:, None], other=0x88)
    for g in tl.range(0, units, num_stages=STAGES):
        w_ahead = tl.load(a_at + (g + 1) * 32, mask=ok[:, None] & (j < (units - g - 1) * 32)[None, :], other=0x88)
        k = k0 + g * 64 + j
        x_low = tl.load(x_at[:, None] + k[None, :], mask=x_live[:, None] & (k < K)[None, :], other=0.0)
        x_high = tl.load(x_at[:, None] + 32 + k[None, :], mask=x_live[:, None] & (k + 32 < K)[None, :], other=0.0)
        scale = tl.load(scale_at + g * rows, mask=ok, other=0.0).to(tl.float32)
        low, high = nibbles(w, DOT)
        part = tl.dot(low, tl.trans(x_low.to(DOT)))
        part = tl.dot(high, tl.trans(x_high.to(DOT)), part)
        acc += part * scale[:, None]
        w = w_ahead
    return acc


@triton.jit
def prefill_shrink_kernel(
    x_ptr, arena_ptr, table_ptr, cells_ptr, blocks_ptr, order_ptr, h_ptr,
    K: tl.constexpr, RANGES: tl.constexpr, GROUP_ROWS: tl.constexpr, SIDE: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, BF16: tl.constexpr, FP16: tl.constexpr, INT8: tl.constexpr, INT4: tl.constexpr,
    DOT: tl.constexpr, MAGIC: tl.constexpr,
):
    """Compute h[cell, 0, i, r] = Σ_k scale[r] · A[cell][r, k] · x[order[start + i], k].   Grid (blocks).

    Shapes and dtypes as shrink_kernel's, with one part.
    """
    block = tl.program_id(0)
    span = tl.load(blocks_ptr + 2 * block + 1)
    rows_here = bits(span, 32, 8)
    if rows_here > 0:
        word = tl.load(blocks_ptr + 2 * block)
        s = tl.arange(0, 16 * SIDE)
        r = s % 16
        cell = low_word(word) + s // 16
        known = s // 16 < low_word(word >> 32)
        first = tl.load(cells_ptr + 2 * cell, mask=known, other=0).to(tl.int32)
        i = tl.arange(0, GROUP_ROWS)
        live = i < rows_here
        row = tl.load(order_ptr + low_word(span) + i, mask=live, other=0).to(tl.int64)
        x_at = x_ptr + row * K
        acc = tl.zeros((16 * SIDE, GROUP_ROWS), tl.float32)
        most = tl.zeros((16 * SIDE,), tl.int32)
        scale = tl.full((16 * SIDE,), 1.0, tl.float32)  # of a row in INT8 or 16 bit, the same in all its ranges
        for c in tl.range(0, RANGES, num_stages=1):
            entry = tl.load(table_ptr + first + c, mask=known, other=0)
            rows = entry_rows(entry)
            fmt = entry_format(entry)
            tile = arena_ptr + entry_offset(entry)
            units = tl.minimum(16, (K + 63) // 64 - c * 16)
            k0 = c * 1024
            ok = r < rows
            most = tl.maximum(most, rows)
            if INT8:
                here = ok & (fmt == FORMAT_INT8)
                if tl.max(here.to(tl.int32), 0) > 0:
                    scale_at = (tile + rows * (units * 64)).to(tl.pointer_type(tl.float32)) + r
                    scale = tl.where(here, tl.load(scale_at, mask=here, other=1.0), scale)
                    elements = tile.to(tl.pointer_type(tl.int8))
                    acc = _wide_range(acc, x_at, live, elements, here, r, units, k0, K, BK, STAGES, DOT, MAGIC)
            if BF16:
                here = ok & (fmt == FORMAT_BF16)
                if tl.max(here.to(tl.int32), 0) > 0:
                    scale_at = (tile + rows * (units * 128)).to(tl.pointer_type(tl.float32)) + r
                    scale = tl.where(here, tl.load(scale_at, mask=here, other=1.0), scale)
                    elements = tile.to(tl.pointer_type(tl.bfloat16))
                    acc = _wide_range(acc, x_at, live, elements, here, r, units, k0, K, BK, STAGES, DOT, False)
            if FP16:
                here = ok & (fmt == FORMAT_FP16)
                if tl.max(here.to(tl.int32), 0) > 0:
                    scale_at = (tile + rows * (units * 128)).to(tl.pointer_type(tl.float32)) + r
                    scale = tl.where(here, tl.load(scale_at, mask=here, other=1.0), scale)
                    elements = tile.to(tl.pointer_type(tl.float16))
                    acc = _wide_range(acc, x_at, live, elements, here, r, units, k0, K, BK, STAGES, DOT, False)
            if INT4:
                here = ok & (fmt == FORMAT_INT4)
                if tl.max(here.to(tl.int32), 0) > 0:
                    acc = _nibble_range(acc, x_at, live, tile, here, r, rows, units, k0, K, STAGES, DOT)
        at = h_ptr + cell.to(tl.int64) * (GROUP_ROWS * 16)
        mask = live[None, :] & (known & (r < most))[:, None]
        tl.store(at[:, None] + i[None, :] * 16 + r[:, None], acc * scale[:, None], mask=mask)
