"""Residual, norm and activation as functions of torch tensors: what a backend calls.

A `delta` is a LoRA delta buffer and SiteWork.adapted of the site whose product is the other input.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from worker.kernels.triton.platform import COMPILE, power_of_2
from worker.kernels.triton.pointwise import norm_kernel, silu_mul_kernel

_SILU_BLOCK: Final = 1024


def rms_norm(residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Compute out = weight · residual / √(mean(residual²) + eps) by rows; both [T, H] contiguous, weight [H]."""
    _norm(residual, None, (weight, eps, out), None)


def add_norm(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float, out: Tensor, *, delta: tuple[Tensor, Tensor] | None = None
) -> None:
    """Compute residual += x (+ delta), in place, then out = its RMS norm. All [T, H] contiguous, 16-bit; weight [H]."""
    _norm(residual, x, (weight, eps, out), delta)


def add(residual: Tensor, x: Tensor, *, delta: tuple[Tensor, Tensor] | None = None) -> None:
    """Compute residual += x (+ delta) in place; all [T, H] contiguous."""
    _norm(residual, x, None, delta)


def silu_mul(gate_up: Tensor, out: Tensor, *, delta: tuple[Tensor, Tensor] | None = None) -> None:
    """Compute out = silu(gate) · up of gate_up [T, 2 · inner] (+ delta), which is only read; out [T, inner]."""
    inner = out.shape[-1]
    delta_of, adapted = delta or (gate_up, gate_up)
    silu_mul_kernel[(len(gate_up), -(-inner // _SILU_BLOCK))](
        gate_up, delta_of, adapted, out, INNER=inner, BLOCK=_SILU_BLOCK, DELTA=delta is not None, num_warps=4, **COMPILE
    )


def _norm(
    residual: Tensor,
    x: Tensor | None,
    norm: tuple[Tensor, float, Tensor] | None,
    delta: tuple[Tensor, Tensor] | None,
) -> None:
    """`norm` is weight, eps and out."""
    hidden = residual.shape[-1]
    delta_of, adapted = delta or (residual, residual)
    weight, eps, out = norm or (residual, 0.0, residual)
    norm_kernel[(len(residual),)](
        residual, residual if x is None else x, delta_of, adapted, weight, out, eps,
        H=hidden, H_2=power_of_2(hidden), ADD=x is not None, DELTA=delta is not None, NORM=norm is not None,
        num_warps=4 if hidden <= 4096 else 8, **COMPILE,
    )  # fmt: skip
