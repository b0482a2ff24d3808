"""Tapes: steps of one size are played, and give what they would have given recorded; rooms go to whoever comes next."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.arena import batch_of, make_arena, randn
from tests.kernels.test_backends import adapters_in
from worker.kernels.cpu.backend import CpuBackend, CpuKernels, CpuStep
from worker.kernels.cpu.pool import shared_pool
from worker.kernels.cpu.tape import MOST_TAPES, Tape
from worker.kernels.layout import AttentionShape, Site
from worker.kernels.linear import Linear

SHAPE = AttentionShape(2, 4, 2, 16)
COS, SIN = randn(300, 8, seed=2).cos(), randn(300, 8, seed=2).sin()
BACKEND = CpuBackend(shared_pool(2))
EMBEDDING = BACKEND.pack(Linear.plain(randn(50, 64, seed=30), None))
LINEARS = [BACKEND.pack(Linear.plain(randn(width, 64, seed=width) / 8, None)) for width in (64, 128, 64)]
NORM = randn(64, seed=4)
WIDE_EMBEDDING = BACKEND.pack(Linear.plain(randn(50, 80, seed=31), None))
WIDE_LINEAR = BACKEND.pack(Linear.plain(randn(256, 80, seed=32) / 8, None))
KEPT: list[CpuStep] = []
"""Steps whose arrays stay: where the next one's lay at the same addresses, replays with stale ones would be right."""
LINEARS_80 = BACKEND.pack(Linear.plain(randn(128, 80, seed=33) / 8, None))


@pytest.fixture
def kernels() -> CpuKernels:
    return BACKEND.bind(make_arena(SHAPE), COS, SIN)


def layer(step: CpuStep, x: Tensor, index: int) -> Tensor:
    """What drops its intermediate results, as a model's layers do."""
    attended = step.attention(step.linear(LINEARS[1], x), index, None, 1e-5)
    return step.silu_mul(step.linear(LINEARS[1], step.rms_norm(step.linear(LINEARS[0], attended), NORM, 1e-5)))


def run(kernels: CpuKernels, tokens: list[int], position: int) -> Tensor:
    step = kernels.step(batch_of([(position, len(tokens))], {}, [-1]))
    x = step.embed(EMBEDDING, torch.tensor(tokens))
    for index in (0, 1, 0, 1):
        x = layer(step, x, index)
    step.finish()
    return x.clone()


def test_a_step_that_is_played_gives_what_it_gave_when_it_was_recorded(kernels: CpuKernels) -> None:
    steps = [([3, 4, 5], 0), ([7], 3), ([9], 4), ([1, 2, 3], 5), ([9], 8), ([4, 4, 4], 9)]
    played = [run(kernels, *step) for step in steps]
    recorded = []
    for count in range(1, len(steps) + 1):  # each step's keys and values are there, and nothing was recorded before it
        fresh = BACKEND.bind(kernels.arena, COS, SIN)
        recorded.append(run(fresh, *steps[count - 1]))
    assert all(torch.equal(*pair) for pair in zip(played, recorded, strict=True))


def adapted(kernels: CpuKernels, tokens: Tensor, lengths: list[tuple[int, int]], slots: list[int]) -> Tensor:
    """A step over requests with adapters, replayed if one like it was remembered."""
    step = kernels.step(batch_of(lengths, adapters_in(kernels.arena, [0, 1, 2], (4, 0, 9), None), slots))
    KEPT.append(step)
    known = step.replay(tokens)
    if known is None:
        x = step.embed(WIDE_EMBEDDING, tokens)
        wide = step.linear(WIDE_LINEAR, x)
        step.lora_add(wide, x, 1, Site.QKV)
        attended = step.attention(step.linear(LINEARS_80, x), 1, None, 1e-5)
        step.finish()
        step.remember(wide, attended)
        known = (wide, attended)
    return torch.cat([result.clone() for result in known], dim=1)


def test_a_replayed_step_has_its_own_tokens_blocks_and_adapters() -> None:
    steps = [
        ([3, 4, 5], [(0, 1), (20, 1), (5, 1)], [0, 1, 1]),
        ([9, 8, 7], [(33, 1), (2, 1), (50, 1)], [2, 2, 0]),
        ([1, 1, 2], [(0, 1), (0, 1), (0, 1)], [-1, -1, 2]),
        ([6, 6, 6], [(15, 1), (16, 1), (17, 1)], [1, 2, 0]),
        ([3, 4, 5], [(4, 3)], [1]),
    ]
    kernels = BACKEND.bind(make_arena(SHAPE, num_chunks=200), COS, SIN)
    replayed, fresh = [], []
    for tokens, lengths, slots in steps:
        order = sorted(range(len(slots)), key=lambda n: slots[n])  # rows of an adapter are neighbours
        where = [lengths[n] for n in order], [slots[n] for n in order]
        kernels.arena.kv.fill_(0.5)
        replayed.append(adapted(kernels, torch.tensor(tokens), *where))
        kernels.arena.kv.fill_(0.5)
        fresh.append(adapted(BACKEND.bind(kernels.arena, COS, SIN), torch.tensor(tokens), *where))
    assert all(torch.equal(*pair) for pair in zip(replayed, fresh, strict=True))
    assert kernels.tapes.find((3, True, True)).remembered is not None


def test_a_step_in_parts_is_not_replayed(kernels: CpuKernels) -> None:
    x = randn(2, 64, seed=1)
    for _ in range(3):
        step = kernels.step(batch_of([(0, 2)], {}, [-1]))
        assert step.replay(torch.tensor([1, 2])) is None
        y = step.linear(LINEARS[0], x)
        step.finish()
        z = step.linear(LINEARS[2], y)
        step.finish()
        step.remember(z)


def test_rooms_of_dropped_results_are_used_again(kernels: CpuKernels) -> None:
    run(kernels, [1, 2, 3], 0)
    few = kernels.tapes.find((3, False, False)).end
    step = kernels.step(batch_of([(0, 4)], {}, [-1]))
    x = step.embed(EMBEDDING, torch.tensor([1, 2, 3, 4]))
    held = [x]
    for index in (0, 1, 0, 1):
        held.append(layer(step, held[-1], index))
    step.finish()
    assert kernels.tapes.find((4, False, False)).end[1] > 4 * few[1] / 3
    assert len({tensor.data_ptr() for tensor in held}) == len(held)


def test_a_held_result_is_not_written_over(kernels: CpuKernels) -> None:
    x = randn(5, 64, seed=1)
    for _ in range(2):
        step = kernels.step(batch_of([(0, 5)], {}, [-1]))
        first = step.linear(LINEARS[0], x)
        for _ in range(3):
            step.linear(LINEARS[0], step.linear(LINEARS[2], first))
        step.finish()
        assert torch.allclose(first, x @ (randn(64, 64, seed=64) / 8).T, atol=1e-5)


def test_a_step_that_leaves_its_tape_is_recorded_from_there_on(kernels: CpuKernels) -> None:
    x, other = randn(2, 64, seed=1), randn(2, 64, seed=2)
    weights = [randn(64, 64, seed=64) / 8] * 2

    def compute(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        step = kernels.step(batch_of([(0, 2)], {}, [-1]))
        y = step.linear(LINEARS[0], first)
        step.finish()
        z = step.linear(LINEARS[2], second)
        step.finish()
        return y.clone(), z.clone()

    for first, second in ((x, x), (x, other), (other, x), (x, x)):
        y, z = compute(first, second)
        assert torch.allclose(y, first @ weights[0].T, atol=1e-5)
        assert torch.allclose(z, second @ weights[1].T, atol=1e-5)


def test_an_operator_with_other_rows_is_not_taken_for_the_one_on_the_tape(kernels: CpuKernels) -> None:
    x, delta = randn(4, 64, seed=1), torch.ones(4, 64)
    for rows in (2, 3, 1):
        step = kernels.step(batch_of([(0, 4)], {}, [-1]))
        y = step.linear(LINEARS[0], x[:rows])  # at one address, however many
        total = x[:rows].clone()
        sums = delta.clone()
        step.add(sums[:rows], total)
        step.finish()
        assert torch.allclose(y, x[:rows] @ (randn(64, 64, seed=64) / 8).T, atol=1e-5)
        assert torch.equal(sums[:rows], x[:rows] + 1)


def test_tapes_are_forgotten_when_there_are_too_many(kernels: CpuKernels) -> None:
    for size in range(MOST_TAPES + 5):
        kernels.tapes.keep((size, False), Tape())
    assert all(kernels.tapes.find((size, False)) is not kernels.tapes.find((size, False)) for size in range(5))
    assert kernels.tapes.find((5, False)) is kernels.tapes.find((5, False))


def test_the_workspace_stays_in_proportion_to_the_largest_step(kernels: CpuKernels) -> None:
    wide = BACKEND.pack(Linear.plain(randn(3000, 64, seed=5), None))
    for rows in range(700, 1500, 7):
        step = kernels.step(batch_of([(0, 1)], {}, [-1]))
        x = torch.zeros(rows, 64)
        first = step.linear(wide, x)
        second = step.linear(wide, x)
        assert len(first) == len(second) == rows
        step._recorder.executed()  # nothing needs to be computed for it
    assert kernels.tapes.workspace.size < 4 * 2 * 1500 * 3000 + 2**24


def test_answers_are_replayed_though_a_prompt_of_as_many_rows_was_first(kernels: CpuKernels) -> None:
    for lengths in ([(0, 3)], [(0, 1)] * 3, [(5, 1)] * 3):
        step = kernels.step(batch_of(lengths, {}, [-1] * len(lengths)))
        replayed = step.replay(torch.tensor([1, 2, 3]))
        if replayed is None:
            x = step.embed(EMBEDDING, torch.tensor([1, 2, 3]))
            if len(lengths) == 1:
                step.finish()
            y = step.linear(LINEARS[0], x)
            step.finish()
            step.remember(y)
    assert replayed is not None


def test_a_kind_that_was_first_recorded_in_parts_is_replayed_once_it_comes_whole(kernels: CpuKernels) -> None:
    seen = []
    for parts in (2, 1, 1, 1):
        step = kernels.step(batch_of([(0, 1)] * 2, {}, [-1] * 2))
        seen.append(step.replay(torch.tensor([1, 2])) is not None)
        if not seen[-1]:
            x = step.embed(EMBEDDING, torch.tensor([1, 2]))
            if parts == 2:
                step.finish()
            y = step.linear(LINEARS[0], x)
            step.finish()
            if parts == 1:
                step.remember(y)
    assert seen == [False, False, False, True]
