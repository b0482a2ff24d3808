"""Paged attention over chunks of the arena: decode with its keys split over programs, and chunked prefill.

A chunk holds 16 positions of all layers, as [layers][2][kv_heads][16][head_dim] of the model's dtype. Positions a row
may not see are never read, whatever bytes of a former owner lie there. Online softmax (FlashAttention, arXiv
2205.14135); the cut of the keys is fixed by position, so a row's result depends on no other row.
"""

import triton
import triton.language as tl

# Kernels have many arguments: one a line would hide the code.
# fmt: off

@triton.jit(do_not_specialize=["layer", "table_stride"])
def attend_kernel(
    q_ptr, arena_ptr, blocks_ptr, items_ptr, out_ptr, partial_ptr, max_sum_ptr, layer, table_stride, scale_log2e,
    KV_HEADS: tl.constexpr, PER_KV: tl.constexpr, PER_KV_2: tl.constexpr, DIM: tl.constexpr, DIM_2: tl.constexpr,
    CHUNK_BYTES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PER_SPLIT: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, DOT: tl.constexpr,
):
    """Compute out[row, h] = softmax(q[row, h] · kᵀ / √DIM) v over positions ≤ the row's.

    Grid (items, KV_HEADS, SPLITS). items int32 [items, 4]: request, first row, rows (≤ ROWS; 0: nothing), position of
    the first row. blocks int32 [requests, table_stride]: chunk ids. q, out [T, KV_HEADS · PER_KV, DIM]; query head h
    reads key head h // PER_KV.
    With SPLITS > 1 (ROWS must be 1) partial [items, heads, SPLITS, DIM] and max_sum [items, heads, SPLITS, 2] float32
    are written instead of out, for combine_kernel. PER_KV_2 and DIM_2 are PER_KV and DIM rounded up to powers of two.
    """
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    rows = tl.load(items_ptr + 4 * item + 2)
    position = tl.load(items_ptr + 4 * item + 3)
    low = split * PER_SPLIT
    if (rows > 0) & (low < position + rows):
        end = tl.minimum(position + rows, low + PER_SPLIT)
        request = tl.load(items_ptr + 4 * item).to(tl.int64)
        first = tl.load(items_ptr + 4 * item + 1)
        # A line of the product is one row's query head; lines of one row are neighbours.
        line = tl.arange(0, ROWS * PER_KV_2)
        i = line // PER_KV_2
        of_kv = line % PER_KV_2
        live = (i < rows) & (of_kv < PER_KV)
        d = tl.arange(0, DIM_2)
        head = kv_head * PER_KV + of_kv
        q_at = ((first + i).to(tl.int64) * (KV_HEADS * PER_KV) + head) * DIM
        q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=live[:, None] & (d < DIM)[None, :], other=0.0)
        element = q_ptr.dtype.element_ty
        ITEM: tl.constexpr = q_ptr.dtype.element_ty.primitive_bitwidth // 8
        PLANE: tl.constexpr = KV_HEADS * 16 * DIM
        base = arena_ptr.to(tl.pointer_type(element)) + layer.to(tl.int64) * (2 * PLANE) + kv_head * (16 * DIM)
        table = blocks_ptr + request * table_stride
        best = tl.full((ROWS * PER_KV_2,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS * PER_KV_2,), tl.float32)
        acc = tl.zeros((ROWS * PER_KV_2, DIM_2), tl.float32)
        j = tl.arange(0, BLOCK)
        for k0 in tl.range(low, end, BLOCK, num_stages=STAGES):
            at = k0 + j
            known = at < end
            chunk = tl.load(table + at // 16, mask=known, other=0).to(tl.int64)
            p = base + (chunk * (CHUNK_BYTES // ITEM) + (at % 16) * DIM)[:, None] + d[None, :]
            mask = known[:, None] & (d < DIM)[None, :]
            key = tl.load(p, mask=mask, other=0.0)
            score = tl.dot(q.to(DOT), tl.trans(key.to(DOT))) * scale_log2e
            score = tl.where(known[None, :] & (at[None, :] <= (position + i)[:, None]), score, float("-inf"))
            higher = tl.maximum(best, tl.max(score, 1))
            kept = tl.exp2(best - higher)
            weight = tl.exp2(score - higher[:, None])
            total = total * kept + tl.sum(weight, 1)
            value = tl.load(p + PLANE, mask=mask, other=0.0)
            acc = acc * kept[:, None] + tl.dot(weight.to(DOT), value.to(DOT))
            best = higher
        if SPLITS == 1:
            o = acc / total[:, None]
            tl.store(out_ptr + q_at[:, None] + d[None, :], o.to(element), mask=live[:, None] & (d < DIM)[None, :])
        else:
            at = (item.to(tl.int64) * (KV_HEADS * PER_KV) + head) * SPLITS + split
            tl.store(partial_ptr + at[:, None] * DIM + d[None, :], acc, mask=live[:, None] & (d < DIM)[None, :])
            tl.store(max_sum_ptr + 2 * at, best, mask=live)
            tl.store(max_sum_ptr + 2 * at + 1, total, mask=live)


@triton.jit
def combine_kernel(
    out_ptr, partial_ptr, max_sum_ptr, items_ptr,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_2: tl.constexpr, PER_SPLIT: tl.constexpr, SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,
):
    """Put the splits of attend_kernel's items of one row together; out as there.   Grid (items, HEADS)."""
    item = tl.program_id(0)
    head = tl.program_id(1)
    rows = tl.load(items_ptr + 4 * item + 2)
    if rows > 0:
        row = tl.load(items_ptr + 4 * item + 1).to(tl.int64)
        length = tl.load(items_ptr + 4 * item + 3) + 1
        s = tl.arange(0, SPLITS_2)
        d = tl.arange(0, DIM_2)
        used = (s < SPLITS) & (s * PER_SPLIT < length)
        at = (item.to(tl.int64) * HEADS + head) * SPLITS + s
        best = tl.load(max_sum_ptr + 2 * at, mask=used, other=float("-inf"))
        total = tl.load(max_sum_ptr + 2 * at + 1, mask=used, other=0.0)
        weight = tl.exp2(best - tl.max(best, 0))
        mask = used[:, None] & (d < DIM)[None, :]
        partial = tl.load(partial_ptr + at[:, None] * DIM + d[None, :], mask=mask, other=0.0)
        o = tl.sum(partial * weight[:, None], 0) / tl.sum(total * weight, 0)
        tl.store(out_ptr + (row * HEADS + head) * DIM + d, o.to(out_ptr.dtype.element_ty), mask=d < DIM)
