"""Drawing in compiled code against drawing in torch, which sorts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.arena import make_arena, randn
from worker.kernels.cpu.backend import CpuBackend, CpuKernels
from worker.kernels.cpu.pool import shared_pool
from worker.kernels.draws import Drawing, Draws
from worker.kernels.layout import AttentionShape
from worker.mailbox import Sampling
from worker.model.choice import draw

SHAPE = AttentionShape(2, 4, 2, 16)


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    return CpuBackend(shared_pool(2)).bind(make_arena(SHAPE), randn(8, 8), randn(8, 8))


def of(samplings: list[Sampling], uniforms: np.ndarray) -> Draws:
    return Draws.of(range(len(samplings)), samplings, uniforms)


def logits_like(kind: str, rows: int, size: int, seed: int) -> torch.Tensor:
    logits = randn(rows, size, seed=seed)
    if kind == "peaked":
        logits[:, : size // 20 + 1] += 12 * torch.rand(
            rows, size // 20 + 1, generator=torch.Generator().manual_seed(seed)
        )
    elif kind == "tied":
        logits = (logits * 2).round()
    elif kind == "barred":
        logits[:, ::3] = -torch.inf
    return logits


@pytest.mark.parametrize("kind", ["flat", "peaked", "tied", "barred"])
@pytest.mark.parametrize("size", [3, 64, 65, 1000, 20_000])
def test_filters_and_draws_are_those_of_torch(kernels: CpuKernels, size: int, kind: str) -> None:
    generator = np.random.default_rng(size)
    samplings = [
        Sampling(temperature=t, top_k=k, top_p=p, min_p=m)
        for t in (0.3, 1.0, 2.5)
        for k in (0, 1, 2, 40, 999, 10**6)
        for p in (1.0, 0.999, 0.9, 0.3, 1e-6)
        for m in (0.0, 0.02, 1.0)
    ]
    uniforms = generator.random(len(samplings))
    logits = logits_like(kind, len(samplings), size, seed=size)
    expected = draw(logits.clone(), samplings, uniforms).tolist()
    drawn = kernels.draw(logits.clone(), of(samplings, uniforms)).tolist()
    different = [n for n, pair in enumerate(zip(drawn, expected, strict=True)) if pair[0] != pair[1]]
    assert len(different) <= 1  # weights are rounded otherwise, and a uniform number may fall between two roundings


def test_the_ends_of_the_unit_interval_are_the_first_and_the_last_kept_token(kernels: CpuKernels) -> None:
    logits = torch.full((2, 100), -5.0)
    logits[:, 20], logits[:, 70] = 3.0, 2.9
    samplings = [Sampling(temperature=1.0, top_k=2)] * 2
    assert kernels.draw(logits, of(samplings, np.array([0.0, 1 - 2**-53]))).tolist() == [20, 70]


def test_some_rows_are_drawn_and_the_others_left_alone(kernels: CpuKernels) -> None:
    logits = randn(5, 300)
    before = logits.clone()
    samplings = [Sampling(temperature=0.7, top_p=0.9)] * 2
    drawn = kernels.draw(logits, Draws.of([1, 4], samplings, np.array([0.2, 0.8]))).tolist()
    assert drawn == draw(before[[1, 4]].clone(), samplings, np.array([0.2, 0.8])).tolist()
    assert torch.equal(logits[[0, 2, 3]], before[[0, 2, 3]])


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_k=3), Sampling(top_p=0.5), Sampling(min_p=0.1)], ids=str)
def test_a_broken_row_ends_and_stays_its_own(kernels: CpuKernels, sampling: Sampling) -> None:
    logits = randn(4, 200)
    logits[0, 5], logits[1], logits[2] = torch.nan, torch.inf, -torch.inf
    expected = draw(logits[3:].clone(), [sampling], np.array([0.4])).tolist()
    drawn = kernels.draw(logits, of([sampling] * 4, np.full(4, 0.4))).tolist()
    assert drawn[3:] == expected
    assert all(0 <= token < 200 for token in drawn)


@pytest.mark.parametrize("temperature", [1e-45, 1e-40, 2e-39, 1e-38, 1e-20, 1e-60])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_the_coldest_draw_is_the_likeliest_token(kernels: CpuKernels, temperature: float, top_p: float) -> None:
    logits = randn(5, 300)
    samplings = [Sampling(temperature=temperature, top_p=top_p)] * 5
    drawn = kernels.draw(logits.clone(), of(samplings, np.full(5, 0.7)))
    assert torch.equal(drawn, logits.argmax(dim=-1))


def test_these_kernels_draw(kernels: CpuKernels) -> None:
    assert isinstance(kernels, Drawing)
