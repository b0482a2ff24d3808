"""The pool: tasks that raise, and callers at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from tests.kernels.arena import batch_of, make_arena, randn
from worker.kernels.cpu.backend import CpuBackend
from worker.kernels.cpu.pool import Pool
from worker.kernels.cpu.program import ROW, Op
from worker.kernels.layout import AttentionShape
from worker.kernels.linear import Linear

SHAPE = AttentionShape(2, 4, 2, 16)
COS, SIN = randn(300, 8, seed=2).cos(), randn(300, 8, seed=2).sin()
NO_MEMORY_HOLDS = 2**46
"""Rows whose scores no address space has room for."""


@pytest.fixture(scope="module", params=[1, 3], ids=["alone", "with followers"])
def pool(request: pytest.FixtureRequest) -> Pool:
    return Pool(int(request.param))


def linear_of(pool: Pool, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    backend = CpuBackend(pool)
    step = backend.bind(make_arena(SHAPE), COS, SIN).step(batch_of([(0, 1)] * len(x), {}, [-1] * len(x)))
    y = step.linear(backend.pack(Linear.plain(weight, None)), x)
    step.finish()
    return y


def test_tasks_without_memory_end_the_program_and_nothing_else(pool: Pool) -> None:
    qkv, out = np.zeros((64, 8 * 16), np.float32), np.zeros((64, 4 * 16), np.float32)
    positions, cache = np.zeros(64, np.int64), np.zeros(16, np.float32)
    tables, items = np.zeros((1, 1), np.int64), np.array([(0, row, NO_MEMORY_HOLDS) for row in range(64)])
    untouched = np.ones((4, 8), np.float32)
    attention: tuple[int, ...] = (
        qkv.ctypes.data,
        64,
        4,
        2,
        16,
        SHAPE.block_elements,
        0,
        positions.ctypes.data,
        cache.ctypes.data,
    )
    attention += (16, 0, tables.ctypes.data, 1, 1, items.ctypes.data, 64, out.ctypes.data)
    program = np.zeros((2, ROW), np.int64)
    program[0, : 2 + len(attention)] = (Op.ATTEND, 128, *attention)
    program[1, :6] = (Op.ADD, 4, untouched.ctypes.data, 4, 8, untouched.ctypes.data)
    for _ in range(20):
        with pytest.raises(MemoryError, match="intermediate results"):
            pool.run(program)
    assert (untouched == 1).all()  # the program ended with the operation that failed
    weight, x = randn(200, 64), randn(5, 64, seed=1)
    assert torch.allclose(linear_of(pool, weight, x), x @ weight.T, atol=1e-4)


def test_programs_of_several_callers_do_not_meet(pool: Pool) -> None:
    weights, xs = [randn(300, 64, seed=n) for n in range(4)], [randn(7, 64, seed=10 + n) for n in range(4)]

    def compute(n: int) -> bool:
        return all(
            torch.allclose(linear_of(pool, weights[n], xs[n]), xs[n] @ weights[n].T, atol=1e-4) for _ in range(50)
        )

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(compute, range(4)))
