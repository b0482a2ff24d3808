"""The torch backend against the float32 oracle: rank x popularity, lengths x heads, formats, and rows left alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from worker.engine.plan import SequenceStep
from worker.kernels.eager import EagerKernels
from worker.kernels.layout import Expand, KvCache, LayerFactors, LoraGroup, Site, SiteFactors
from worker.kernels.reference import ReferenceKernels
from worker.model.batch import build_step

CPU = torch.device("cpu")
REFERENCE = ReferenceKernels()
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    error = float((actual.float() - expected.float()).norm() / expected.float().norm())
    assert error < TOLERANCE[actual.dtype]


@DTYPES
@pytest.mark.parametrize("shape", [(1, 64), (7, 64), (5, 3, 16)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = randn(*shape, dtype=dtype) * 3
    weight = randn(*shape[1:], seed=1, dtype=dtype)
    assert_close(EagerKernels().rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))


@DTYPES
def test_rotate_leaves_its_input_alone(dtype: torch.dtype) -> None:
    fused = randn(9, 10, 32, dtype=dtype)
    x = fused[:, 2:7]  # strided, as the decoder passes it
    before = fused.clone()
    angles = randn(9, 1, 16, seed=2) * 100
    assert_close(EagerKernels().rotate(x, angles.cos(), angles.sin()), REFERENCE.rotate(x, angles.cos(), angles.sin()))
    assert torch.equal(fused, before)


@DTYPES
def test_silu_mul(dtype: torch.dtype) -> None:
    gate_up = randn(6, 48, dtype=dtype) * 4
    assert_close(EagerKernels().silu_mul(gate_up.clone()), REFERENCE.silu_mul(gate_up))


POPULARITY: dict[str, Callable[[int], list[int]]] = {
    "identical": lambda n: [0] * n,
    "distinct": lambda n: list(range(n)),
    "uniform": lambda n: [i * i // n for i in range(n)],
    "skewed": lambda n: [0] * (n - 3) + [1, 2, 3],
    "with base": lambda n: [-1] * (n // 2) + [i // 2 for i in range(n - n // 2)],
    "all base": lambda n: [-1] * n,
}


def site_factors(ranks: Sequence[int], widths: Sequence[int], inner: int, seed: int, dtype: torch.dtype) -> SiteFactors:
    expands, shrinks, out, rank = [], [], 0, 0
    for index, (r, width) in enumerate(zip(ranks, widths, strict=True)):
        if r:
            shrinks.append(randn(r, inner, seed=seed + index, dtype=dtype) / inner**0.5)
            factor = randn(width, r, seed=seed + 50 + index, dtype=dtype)
            expands.append(Expand(slice(out, out + width), slice(rank, rank + r), factor.t(), 0.5 + index))
        out, rank = out + width, rank + r
    return SiteFactors(torch.cat(shrinks).t(), tuple(expands))


@DTYPES
@pytest.mark.parametrize("popularity", POPULARITY)
@pytest.mark.parametrize("ranks", [(1, 1, 1), (8, 8, 8), (16, 0, 4), (0, 3, 64), (128, 0, 0)], ids=str)
def test_lora_add(ranks: tuple[int, ...], popularity: str, dtype: torch.dtype) -> None:
    rows, inner, widths = 12, 40, (24, 8, 8)
    slots = POPULARITY[popularity](rows)
    groups = []
    for slot, members in itertools.groupby(range(rows), key=slots.__getitem__):
        if slot < 0:
            continue
        of_slot = ranks if slot % 2 == 0 else tuple(reversed([max(r - 1, 0) or 2 for r in ranks]))
        none: LayerFactors = (None, None, None, None)
        here: LayerFactors = (site_factors(of_slot, widths, inner, 100 * slot, dtype), None, None, None)
        first, *rest = members
        groups.append(LoraGroup(first, [first, *rest][-1] + 1, (none, here)))
    x, y = randn(rows, inner, seed=7, dtype=dtype), randn(rows, sum(widths), seed=8, dtype=dtype)
    before, expected = y.clone(), y.clone()
    kernels = EagerKernels()
    REFERENCE.lora_add(expected, x, groups, 1, Site.QKV)
    kernels.lora_add(y, x, groups, 1, Site.QKV)
    assert_close(y, expected)
    base = [row for row, slot in enumerate(slots) if slot < 0]
    assert torch.equal(y[base], before[base])
    assert popularity == "all base" or not torch.equal(y, before)
    for layer, site in ((0, Site.QKV), (1, Site.DOWN)):  # the adapter does not attach there
        again = y.clone()
        kernels.lora_add(again, x, groups, layer, site)
        assert torch.equal(again, y)


def sequences(lengths: Sequence[tuple[int, int]], blocks: int) -> list[SequenceStep]:
    """(position, rows) of each; blocks scattered over the cache, none shared."""
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(1)).tolist()
    steps = []
    for index, (position, count) in enumerate(lengths):
        needed = (position + count + 15) // 16
        taken, order = order[:needed], order[needed:]
        steps.append(SequenceStep(index, (0,) * count, position, tuple(taken), -1, sample=True))
    return steps


@DTYPES
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (3, 3, 8), (9, 3, 64), (8, 1, 24)])
@pytest.mark.parametrize(
    "lengths",
    [
        [(0, 1)],
        [(0, 5)],
        [(15, 1), (16, 1), (17, 1), (0, 1)],
        [(3, 1), (100, 1), (250, 1), (31, 1)],
        [(0, 33), (7, 20), (16, 16), (40, 1), (5, 1)],
    ],
    ids=str,
)
def test_attention(lengths: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    shape = (2, kv_heads, 40, 16, dim)
    past = KvCache(randn(*shape, seed=3, dtype=dtype), randn(*shape, seed=4, dtype=dtype))
    caches = [KvCache(past.keys.clone(), past.values.clone()) for _ in range(2)]
    step = build_step(sequences(lengths, 40), lambda _: (), block_tokens=16, device=CPU)
    rows = len(step.rows.positions)
    fused = randn(rows, heads + 2 * kv_heads, dim, seed=5, dtype=dtype)
    q, k, v = torch.split(fused, [heads, kv_heads, kv_heads], dim=1)
    kernels = EagerKernels()
    for _ in range(2):  # the second time it reuses its room
        actual = kernels.attention(q, k, v, caches[0], 1, step.rows.attention)
    expected = REFERENCE.attention(q, k, v, caches[1], 1, step.rows.attention)
    assert actual.shape == (rows, heads * dim)
    assert_close(actual, expected)
    assert torch.equal(caches[0].keys, caches[1].keys)
    assert torch.equal(caches[0].values, caches[1].values)
    assert torch.equal(caches[0].keys[0], past.keys[0])  # the other layer


def test_attention_of_a_broken_row_stays_its_own() -> None:
    shape = (1, 2, 8, 16, 8)
    step = build_step(sequences([(0, 1), (20, 1), (0, 6)], 8), lambda _: (), block_tokens=16, device=CPU)
    rows = len(step.rows.positions)
    fused = randn(rows, 8, 8, seed=5)
    results = []
    for broken in (False, True):
        cache = KvCache(torch.zeros(shape), torch.zeros(shape))
        poisoned = fused.clone()
        if broken:
            poisoned[0] = torch.nan
            poisoned[0, 0] = torch.inf
        q, k, v = torch.split(poisoned, [4, 2, 2], dim=1)
        results.append(EagerKernels().attention(q, k, v, cache, 0, step.rows.attention))
        assert torch.isfinite(cache.keys).all()
        assert torch.isfinite(cache.values).all()
    assert torch.equal(results[0][1:], results[1][1:])
    assert results[1][0].isnan().any()
