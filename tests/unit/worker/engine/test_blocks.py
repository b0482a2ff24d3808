"""The block pool's promises."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.blocks import BlockPool


def test_blocks_come_in_order_and_the_last_freed_come_again_first() -> None:
    pool = BlockPool(6)
    first = pool.allocate(2)
    assert first == (0, 1)
    assert pool.allocate(2) == (2, 3)
    pool.release(first)
    assert pool.allocate(3) == (0, 1, 4)
    assert pool.free == 1


def test_more_than_is_free_is_not_given() -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    with pytest.raises(ValueError, match="2 KV blocks asked for, 1 are free"):
        pool.allocate(2)
    assert pool.free == 1


@pytest.mark.parametrize("blocks", [(0, 0), (0, 2), (7,), (-1,)])
def test_a_block_that_has_no_owner_is_not_freed_and_nothing_with_it(blocks: tuple[int, ...]) -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(ValueError, match="KV block"):
        pool.release(blocks)
    assert pool.free == 2


@given(st.lists(st.integers(0, 6)))
def test_every_block_has_one_owner_at_most(sizes: list[int]) -> None:
    pool = BlockPool(20)
    owned: list[tuple[int, ...]] = []
    for size in sizes:
        if size <= pool.free:
            owned.append(pool.allocate(size))
        elif owned:
            pool.release(owned.pop(len(owned) // 2))
        flat = [block for blocks in owned for block in blocks]
        assert len(set(flat)) == len(flat)
        assert len(flat) + pool.free == 20
