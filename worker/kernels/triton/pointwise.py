"""The operators between matrix products, each reading and writing its rows once; a LoRA delta is added on the way."""

import triton
import triton.language as tl

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
