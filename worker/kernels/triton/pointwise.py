"""The operators between matrix products, each reading and writing its rows once; a LoRA delta is added on the way.

And what outputs of a module become after its LoRA was added: DoRA's scales and biases, by rows that have them.
"""

import triton
import triton.language as tl

from worker.kernels.triton.elements import entry_offset

# Kernels have many arguments: one a line would hide the code.
# fmt: off

@triton.jit
def norm_kernel(
    residual_ptr, x_ptr, delta_ptr, adapted_ptr, weight_ptr, out_ptr, eps,
    H: tl.constexpr, H_2: tl.constexpr, ADD: tl.constexpr, DELTA: tl.constexpr, NORM: tl.constexpr,
):
    """Compute residual[t] += x[t] (+ delta[t]) in place, then out[t] = weight · r / √(mean(r²) + eps) of the sum r.

    All [T, H] 16-bit, the sums in float32; the norm sees the residual as it was stored. Without ADD
    residual is only read, without NORM there is no second half. delta counts for rows with adapted[t] != 0 (DELTA).
    Grid (T); H_2 is H rounded up to a power of two.
    """
    t = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, H_2)
    at = t * H + n
    inside = n < H
    r = tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        r += tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if DELTA:
            if tl.load(adapted_ptr + t) != 0:
                r += tl.load(delta_ptr + at, mask=inside, other=0.0).to(tl.float32)
        stored = r.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + at, stored, mask=inside)
        r = stored.to(tl.float32)
    if NORM:
        root = tl.rsqrt(tl.sum(r * r, 0) / H + eps)
        weight = tl.load(weight_ptr + n, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, (r * root * weight).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul_kernel(
    gate_up_ptr, delta_ptr, adapted_ptr, out_ptr, INNER: tl.constexpr, BLOCK: tl.constexpr, DELTA: tl.constexpr
):
    """Compute out[t] = silu(gate) · up of gate_up[t] (+ delta[t]).

    gate_up, delta [T, 2 · INNER] 16-bit, only read; out [T, INNER]. delta counts for rows with adapted[t] != 0 (DELTA).
    Grid (T, ⌈INNER / BLOCK⌉).
    """
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < INNER
    at = t * (2 * INNER) + n
    gate = tl.load(gate_up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + at + INNER, mask=inside, other=0.0).to(tl.float32)
    if DELTA:
        if tl.load(adapted_ptr + t) != 0:
            gate += tl.load(delta_ptr + at, mask=inside, other=0.0).to(tl.float32)
            up += tl.load(delta_ptr + at + INNER, mask=inside, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + t * INNER + n, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def affine_kernel(
    y_ptr, delta_ptr, rows_ptr, arena_ptr, table_ptr,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, STRIDE: tl.constexpr, FIRST: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute y[t] = scale · (y[t] + delta[t]) + shift in place, for rows with rows[t] >= 0, their adapter's slot.

    Grid (T, Σ ⌈N / COLUMNS⌉). y, delta [T, N0 + N1 + N2] 16-bit, the sum in float32. table int64 [slots · STRIDE], of
    which entry FIRST + j of a slot is that of the site's j-th range of COLUMNS columns, counted module by module; where
    it is 0 the row gets its delta alone. A tile is scale and then shift, float32, each filled up to four numbers.
    """
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows_ptr + t)
    if slot >= 0:
        C0: tl.constexpr = (N0 + COLUMNS - 1) // COLUMNS
        C1: tl.constexpr = (N1 + COLUMNS - 1) // COLUMNS
        j = tl.program_id(1)
        entry = tl.load(table_ptr + slot.to(tl.int64) * STRIDE + FIRST + j)
        c = j
        column = 0
        width = N0
        if j >= C0 + C1:
            c = j - C0 - C1
            column = N0 + N1
            width = N2
        elif j >= C0:
            c = j - C0
            column = N0
            width = N1
        i = tl.arange(0, COLUMNS)
        left = width - c * COLUMNS
        inside = i < left
        at = t * (N0 + N1 + N2) + column + c * COLUMNS + i
        y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
        y += tl.load(delta_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if entry != 0:
            tile = (arena_ptr + entry_offset(entry)).to(tl.pointer_type(tl.float32))
            behind = (tl.minimum(left, COLUMNS) + 3) // 4 * 4
            scale = tl.load(tile + i, mask=inside, other=1.0)
            shift = tl.load(tile + behind + i, mask=inside, other=0.0)
            y = y * scale + shift
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)
