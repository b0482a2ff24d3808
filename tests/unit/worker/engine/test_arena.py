"""The arena's promises: one owner per chunk, no leak, no fragmentation."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from worker.engine.arena import Arena, Use


def test_chunks_come_in_order_and_the_last_freed_come_again_first() -> None:
    arena = Arena(6)
    first = arena.take(2, Use.ADAPTER)
    assert first == (0, 1)
    assert arena.take(2, Use.KV) == (2, 3)
    arena.release(first, Use.ADAPTER)
    assert arena.take(3, Use.KV) == (0, 1, 4)
    assert arena.free == 1


def test_more_than_is_free_is_not_given() -> None:
    arena = Arena(3)
    arena.take(2, Use.KV)
    with pytest.raises(ValueError, match="2 chunks asked for, 1 are free"):
        arena.take(2, Use.KV)
    assert arena.free == 1


@pytest.mark.parametrize("chunks", [(0, 0), (0, 2), (7,), (-1,), (0, 3)])
def test_a_chunk_that_is_not_an_adapter_s_is_not_freed_and_nothing_with_it(chunks: tuple[int, ...]) -> None:
    arena = Arena(5)
    arena.take(2, Use.ADAPTER)
    arena.take(2, Use.KV)  # chunk 3 among them
    with pytest.raises(ValueError, match="chunk"):
        arena.release(chunks, Use.ADAPTER)
    assert arena.free == 1


def test_a_shared_block_is_free_only_after_its_last_reference() -> None:
    arena = Arena(2)
    (block,) = arena.take(1, Use.KV)
    arena.share(block)
    assert not arena.drop(block, keep=False)
    assert arena.free == 1
    assert arena.drop(block, keep=False)
    assert arena.free == 2
    with pytest.raises(ValueError, match="not in use"):
        arena.drop(block, keep=False)


def test_a_kept_block_is_idle_until_it_is_shared_or_released() -> None:
    arena = Arena(2)
    blocks = arena.take(2, Use.KV)
    for block in blocks:
        assert arena.drop(block, keep=True)
    assert (arena.free, arena.count(Use.IDLE_PREFIX)) == (0, 2)
    arena.share(blocks[0])
    assert (arena.count(Use.KV), arena.count(Use.IDLE_PREFIX)) == (1, 1)
    arena.release(blocks[1:], Use.IDLE_PREFIX)
    assert arena.free == 1
    with pytest.raises(ValueError, match="drop"):
        arena.release(blocks[:1], Use.KV)
    with pytest.raises(ValueError, match="no computed"):
        arena.share(blocks[1])


@pytest.mark.parametrize("seed", range(3))
def test_after_10_000_random_operations_every_chunk_is_where_it_should_be_and_all_can_be_had(seed: int) -> None:
    """Any free chunk serves any use: as long as enough are free, a take never fails, however scattered they are."""
    rng, arena = random.Random(seed), Arena(257)
    references: Counter[int] = Counter()
    adapters: list[tuple[int, ...]] = []
    idle: set[int] = set()
    for _ in range(10_000):
        match rng.randrange(6):
            case 0:
                references.update(arena.take(rng.randint(0, min(9, arena.free)), Use.KV))
            case 1:
                adapters.append(arena.take(rng.randint(0, min(20, arena.free)), Use.ADAPTER))
            case 2 if adapters:
                arena.release(adapters.pop(rng.randrange(len(adapters))), Use.ADAPTER)
            case 3 if references or idle:
                block = rng.choice([*references, *idle])
                arena.share(block)
                references[block] += 1
                idle.discard(block)
            case 4 if references:
                block, keep = rng.choice(list(references)), rng.random() < 0.5
                references[block] -= 1
                assert arena.drop(block, keep=keep) == (not references[block])
                if not references[block]:
                    del references[block]
                    idle |= {block} if keep else set()
            case 5 if idle:
                block = rng.choice(list(idle))
                arena.release((block,), Use.IDLE_PREFIX)
                idle.discard(block)
        owned = [*references, *idle, *(chunk for adapter in adapters for chunk in adapter)]
        assert len(set(owned)) == len(owned)
        assert len(owned) + arena.free == arena.total
        assert arena.count(Use.KV) == len(references)
        assert arena.count(Use.IDLE_PREFIX) == len(idle)
    everything = arena.take(arena.free, Use.ADAPTER)
    assert {*owned, *everything} == set(range(arena.total))
