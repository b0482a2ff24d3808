"""Residual, norm and activation, with the LoRA delta and without."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from worker.kernels import reference
from worker.kernels.placing import SiteShape
from worker.kernels.triton.directory import Geometry, TileTable, build_image
from worker.kernels.triton.fused import add_norm, rms_norm, silu_mul
from worker.kernels.triton.lora import scale_and_shift
from worker.kernels.triton.tiles import affine_tiles

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


@DTYPES
def test_scale_and_shift(dtype: torch.dtype) -> None:
    """Modules of more than one column range and of odd widths; one without an affine, and a layer without any."""
    widths, chunk_bytes = (1030, 7, 2050), 2**14
    sites = (SiteShape(64, (64,)), SiteShape(64, widths))
    values = {part: randn(2, widths[part], seed=part, dtype=torch.float32) for part in (0, 2)}
    tiles = {(1, part): [(), affine_tiles(*both.numpy())] for part, both in values.items()}
    image = build_image(Geometry(sites, 16), 2, {}, chunk_bytes, tiles)
    assert image.affine_sites.tolist() == [False, True]
    table = TileTable(
        Geometry(sites, 16), num_layers=2, num_slots=3, chunk_bytes=chunk_bytes, device=torch.device("cpu")
    )
    arena = torch.full((8, chunk_bytes), 0xFF, dtype=torch.uint8)
    chunk_ids = [6, 1, 3][: len(image.chunks)]
    arena[chunk_ids] = torch.from_numpy(image.chunks)
    table.put(2, image, chunk_ids)
    rows = torch.tensor([-1, 2, -1, 2, 2], dtype=torch.int32)
    for layer in (0, 1):
        y, delta = randn(5, sum(widths), seed=8, dtype=dtype), randn(5, sum(widths), seed=9, dtype=dtype)
        delta[rows < 0] = torch.nan
        expected = (y.float() + delta.float()).split(widths, dim=1)
        if layer:
            expected = tuple(
                part if index not in values else part * values[index][0] + values[index][1]
                for index, part in enumerate(expected)
            )
        before = y.clone()
        scale_and_shift(table, layer, 1, y, delta, arena, rows)
        assert torch.equal(y[rows < 0], before[rows < 0])
        assert_close(y[rows >= 0], torch.cat(expected, dim=1)[rows >= 0])
    table.clear(2)
    assert not table.affines.any()
    assert not table.affine_sites.any()
