"""From the fused projection to attention's inputs in one launch: LoRA delta, QK-norm, rotation, KV cache write."""

import triton
import triton.language as tl

# Kernels have many arguments: one a line would hide the code.
# fmt: off

@triton.jit
def _finite(x, LARGEST: tl.constexpr):
    """Bound what is cached: a broken adapter may overflow, and its keys must not reach others as NaN or infinity."""
    x = tl.where(x == x, x, 0.0)  # false for NaN only
    return tl.minimum(tl.maximum(x, -LARGEST), LARGEST)


@triton.jit(do_not_specialize=["layer"])
def rope_kernel(
    qkv_ptr, delta_ptr, adapted_ptr, norm_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, q_ptr, arena_ptr, layer, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF_2: tl.constexpr, CHUNK_BYTES: tl.constexpr,
    HEADS: tl.constexpr, DELTA: tl.constexpr, NORM: tl.constexpr, LARGEST: tl.constexpr,
):
    """q[t] = rotated queries; the arena's chunks get the rotated keys and the values of position slots[t].

    qkv [T, (Q_HEADS + 2 · KV_HEADS) · DIM], only read; delta like it, added first where adapted[t] != 0 (DELTA).
    NORM: RMS norm over each query and key head with norm [Q_HEADS + KV_HEADS, DIM]. cos, sin [positions, DIM / 2]
    float32; pairs (i, i + DIM / 2). slots int64 [T]: chunk · 16 + offset, negative writes nothing. q [T, Q_HEADS, DIM].
    Grid (T, ⌈heads / HEADS⌉); HALF_2 is DIM / 2 rounded up to a power of two.
    """
    t = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = DIM // 2
    ALL: tl.constexpr = Q_HEADS + 2 * KV_HEADS
    element = qkv_ptr.dtype.element_ty
    ITEM: tl.constexpr = qkv_ptr.dtype.element_ty.primitive_bitwidth // 8
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, HALF_2)
    mask = (head < ALL)[:, None] & (d < HALF)[None, :]
    at = (t * ALL + head)[:, None] * DIM + d[None, :]
    first = tl.load(qkv_ptr + at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(qkv_ptr + at + HALF, mask=mask, other=0.0).to(tl.float32)
    if DELTA:
        if tl.load(adapted_ptr + t) != 0:
            first += tl.load(delta_ptr + at, mask=mask, other=0.0).to(tl.float32)
            second += tl.load(delta_ptr + at + HALF, mask=mask, other=0.0).to(tl.float32)
    turns = head < Q_HEADS + KV_HEADS
    if NORM:
        mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / DIM
        weighed = mask & turns[:, None]
        w_at = norm_ptr + head[:, None] * DIM + d[None, :]
        root = tl.where(turns, tl.rsqrt(mean + eps), 1.0)[:, None]
        first = first * root * tl.load(w_at, mask=weighed, other=1.0).to(tl.float32)
        second = second * root * tl.load(w_at + HALF, mask=weighed, other=1.0).to(tl.float32)
    angle = tl.load(positions_ptr + t).to(tl.int64) * HALF + d
    cos = tl.load(cos_ptr + angle, mask=d < HALF, other=1.0)[None, :]
    sin = tl.load(sin_ptr + angle, mask=d < HALF, other=0.0)[None, :]
    rotated_first = tl.where(turns[:, None], first * cos - second * sin, first)
    rotated_second = tl.where(turns[:, None], second * cos + first * sin, second)
    is_query = mask & (head < Q_HEADS)[:, None]
    q_at = q_ptr + (t * Q_HEADS + head)[:, None] * DIM + d[None, :]
    tl.store(q_at, rotated_first.to(element), mask=is_query)
    tl.store(q_at + HALF, rotated_second.to(element), mask=is_query)
    slot = tl.load(slots_ptr + t).to(tl.int64)
    if slot >= 0:
        cached = mask & (head >= Q_HEADS)[:, None]
        plane = (head - Q_HEADS) // KV_HEADS  # 0 keys, 1 values
        kv_head = (head - Q_HEADS) % KV_HEADS
        line = ((layer.to(tl.int64) * 2 + plane) * KV_HEADS + kv_head) * 16 + slot % 16
        kv_at = arena_ptr.to(tl.pointer_type(element)) + (slot // 16) * (CHUNK_BYTES // ITEM)
        kv_at += line[:, None] * DIM + d[None, :]
        tl.store(kv_at, _finite(rotated_first, LARGEST).to(element), mask=cached)
        tl.store(kv_at + HALF, _finite(rotated_second, LARGEST).to(element), mask=cached)
