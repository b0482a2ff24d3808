"""Residual, norm and activation, with the LoRA delta and without."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from worker.kernels import reference
from worker.kernels.triton.fused import add_norm, rms_norm, silu_mul

ADAPTED = torch.tensor([1, 0, 0, 1, 1], dtype=torch.int32)
# The interpreter cuts float32 off to bfloat16 where a GPU rounds, so that bfloat16 is held to less.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
DELTA = pytest.mark.parametrize("delta", [False, True])


def randn(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert float((actual.float() - expected.float()).norm() / expected.float().norm()) < TOLERANCE[actual.dtype]


def delta_of(width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A delta buffer as expand leaves it: rows without an adapter were never written."""
    delta = randn(len(ADAPTED), width, seed=3, dtype=dtype)
    delta[ADAPTED == 0] = torch.nan
    return delta, torch.where(ADAPTED[:, None] > 0, delta.float(), torch.zeros(()))


@DTYPES
@pytest.mark.parametrize("hidden", [64, 576, 1100])
def test_rms_norm(hidden: int, dtype: torch.dtype) -> None:
    x, weight = randn(5, hidden, seed=1, dtype=dtype), randn(hidden, seed=2, dtype=dtype)
    before, out = x.clone(), torch.empty_like(x)
    rms_norm(x, weight, 1e-5, out)
    assert_close(out, reference.rms_norm(x, weight, 1e-5))
    assert torch.equal(x, before)


@DTYPES
@DELTA
@pytest.mark.parametrize("hidden", [64, 576])
def test_add_norm(hidden: int, delta: bool, dtype: torch.dtype) -> None:
    residual, x, weight = (
        randn(5, hidden, seed=1, dtype=dtype),
        randn(5, hidden, seed=4, dtype=dtype),
        randn(hidden, seed=2, dtype=dtype),
    )
    added, counted = delta_of(hidden, dtype)
    expected = residual.float() + x.float() + (counted if delta else 0)
    out = torch.empty_like(x)
    add_norm(residual, x, weight, 1e-5, out, delta=(added, ADAPTED) if delta else None)
    assert_close(residual, expected)
    assert_close(out, reference.rms_norm(residual, weight, 1e-5))


@DTYPES
@DELTA
@pytest.mark.parametrize("inner", [48, 1536])
def test_silu_mul(inner: int, delta: bool, dtype: torch.dtype) -> None:
    gate_up = randn(5, 2 * inner, seed=1, dtype=dtype) * 4
    before = gate_up.clone()
    added, counted = delta_of(2 * inner, dtype)
    out = torch.empty(5, inner, dtype=dtype)
    silu_mul(gate_up, out, delta=(added, ADAPTED) if delta else None)
    expected = reference.silu_mul(gate_up.float() + (counted if delta else 0))
    assert_close(out, expected)
    assert torch.equal(gate_up, before)
