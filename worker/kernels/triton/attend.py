"""Paged attention over chunks of the arena: decode with its keys split over programs, and chunked prefill.

A chunk holds 16 positions of all layers, as [layers][2][kv_heads][16][head_dim] of the model's dtype. Positions a row
may not see are never read, whatever bytes of a former owner lie there. Online softmax (FlashAttention, arXiv
2205.14135); the cut of the keys is fixed by position, so a row's result depends on no other row.
"""

import triton
import triton.language as tl

# Kernels have many arguments: one a line would hide the code.
# fmt: off

@triton.jit(do_not_specialize=["layer"])
def attend_kernel(
    q_ptr, arena_ptr, blocks_ptr, items_ptr, out_ptr, partial_ptr, max_sum_ptr, layer, scale_log2e,
    KV_HEADS: tl.constexpr, PER_KV: tl.constexpr, PER_KV_2: tl.constexpr, DIM: tl.constexpr, DIM_2: tl.constexpr,
    CHUNK_BYTES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PER_SPLIT: tl.constexpr,
    PARTIAL: tl.constexpr, STAGES: tl.constexpr, DOT: tl.constexpr,
):
    """Compute out[row, h] = softmax(q[row, h] · kᵀ / √DIM) v over positions ≤ the row's.

    Grid (items, KV_HEADS). items int32 [items, 5]: first block of the request in blocks, first row, rows (≤ ROWS; 0:
    nothing), position of the first row, first key (of at most PER_SPLIT). blocks int32: chunk ids, a request's in the
    order of its positions. q, out [T, KV_HEADS · PER_KV, DIM]; query head h reads key head h // PER_KV.
    With PARTIAL (ROWS must be 1) partial [items, heads, DIM] and max_sum [items, heads, 2] float32 are written instead
    of out, for combine_kernel. PER_KV_2 and DIM_2 are PER_KV and DIM rounded up to powers of two.
    """
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    rows = tl.load(items_ptr + 5 * item + 2)
    if rows > 0:
        position = tl.load(items_ptr + 5 * item + 3)
        low = tl.load(items_ptr + 5 * item + 4)
        end = tl.minimum(position + rows, low + PER_SPLIT)
        first = tl.load(items_ptr + 5 * item + 1)
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
        table = blocks_ptr + tl.load(items_ptr + 5 * item)
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
        if PARTIAL:
            at = item.to(tl.int64) * (KV_HEADS * PER_KV) + head
            tl.store(partial_ptr + at[:, None] * DIM + d[None, :], acc, mask=live[:, None] & (d < DIM)[None, :])
            tl.store(max_sum_ptr + 2 * at, best, mask=live)
            tl.store(max_sum_ptr + 2 * at + 1, total, mask=live)
        else:
            o = acc / total[:, None]
            tl.store(out_ptr + q_at[:, None] + d[None, :], o.to(element), mask=live[:, None] & (d < DIM)[None, :])


@triton.jit
def combine_kernel(
    out_ptr, partial_ptr, max_sum_ptr, rows_ptr,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_2: tl.constexpr, SIDE: tl.constexpr,
):
    """Put the items of each row together; out as in attend_kernel.   Grid (rows, HEADS).

    rows int32 [rows, 3]: row, its first item, its items; a row without any gets zeros. Lane s sums items s, s + SIDE,
    …, so that a row's result depends on nothing but its own.
    """
    n = tl.program_id(0)
    head = tl.program_id(1)
    count = tl.load(rows_ptr + 3 * n + 2)
    row = tl.load(rows_ptr + 3 * n).to(tl.int64)
    first = tl.load(rows_ptr + 3 * n + 1).to(tl.int64)
    s = tl.arange(0, SIDE)
    d = tl.arange(0, DIM_2)
    best = tl.full((SIDE,), -1.0e38, tl.float32)  # finite: a lane without items has nothing to subtract from
    total = tl.zeros((SIDE,), tl.float32)
    acc = tl.zeros((SIDE, DIM_2), tl.float32)
    for done in tl.range(0, count, SIDE, num_stages=1):
        used = done + s < count
        at = (first + done + s) * HEADS + head
        most = tl.load(max_sum_ptr + 2 * at, mask=used, other=-1.0e38)
        higher = tl.maximum(best, most)
        kept = tl.exp2(best - higher)
        weight = tl.exp2(most - higher)
        total = total * kept + tl.load(max_sum_ptr + 2 * at + 1, mask=used, other=0.0) * weight
        mask = used[:, None] & (d < DIM)[None, :]
        partial = tl.load(partial_ptr + at[:, None] * DIM + d[None, :], mask=mask, other=0.0)
        acc = acc * kept[:, None] + partial * weight[:, None]
        best = higher
    weight = tl.exp2(best - tl.max(best, 0))
    sum_of_weights = tl.sum(total * weight, 0)
    o = tl.sum(acc * weight[:, None], 0) / tl.where(sum_of_weights == 0.0, 1.0, sum_of_weights)
    tl.store(out_ptr + (row * HEADS + head) * DIM + d, o.to(out_ptr.dtype.element_ty), mask=d < DIM)
