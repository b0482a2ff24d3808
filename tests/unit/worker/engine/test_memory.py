"""Adapters and KV blocks in one memory: what fits, what leaves and in which order, and misuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.worker.engine.driver import CONFIG, on_device
from worker.engine.memory import Memory
from worker.engine.plan import AdapterLoad
from worker.engine.rates import StepRates
from worker.engine.request import Request
from worker.engine.residency import Placement
from worker.mailbox import AdapterFile, Sampling, Submit


def memory_of(**limits: Any) -> Memory:
    few: dict[str, Any] = {"max_resident_adapters": 8, "chunk_bytes": 10, "adapter_chunk_bytes": 10}
    return Memory(replace(CONFIG, **{**few, **limits}), StepRates(100.0, 10.0))


def file(digest: str, size: int = 10) -> AdapterFile:
    return AdapterFile(digest, f"/cache/{digest}", size)


def place(
    memory: Memory, digest: str, size: int = 10, claimed: tuple[str, ...] = (), reserve: int = 0
) -> Placement | None:
    submit = Submit(1, (1,), Sampling(), file(digest, size), "default", 0.0)
    request = Request.from_submit(submit, sequence=1, max_known_tokens=9, chain_start=b"", adapter_on_device=False)
    return memory.place(file(digest, size), request, claimed, reserve=reserve, now=0.0)


def load(memory: Memory, digest: str, size: int = 10, seconds: float = 1.0) -> int:
    placement = place(memory, digest, size)
    assert placement is not None
    memory.loaded(placement.slot, AdapterLoad(size, len(placement.chunk_ids)), seconds)
    return placement.slot


def use(memory: Memory, digest: str) -> None:
    memory.release(memory.acquire(digest))


def held(memory: Memory) -> set[str]:
    return set(on_device(memory.residency))


@pytest.mark.parametrize(("size", "chunks"), [(1, 2), (10, 2), (11, 3), (95, 11)])
def test_an_adapter_is_granted_its_bytes_and_one_chunk_more_and_gives_back_what_it_does_not_use(
    size: int, chunks: int
) -> None:
    memory = memory_of()
    placement = place(memory, "a", size)
    assert placement is not None
    assert len(placement.chunk_ids) == chunks
    assert memory.arena.free == 32 - chunks
    slot = memory.loaded(placement.slot, AdapterLoad(size, chunks - 1), 1.0)
    assert slot.chunk_ids == placement.chunk_ids[:-1]
    assert memory.arena.free == 32 - chunks + 1


def test_an_adapter_outside_the_arena_takes_no_chunk() -> None:
    memory = memory_of(adapter_chunk_bytes=0)
    load(memory, "a", 1000)
    assert memory.arena.free == 32


def test_an_adapter_cannot_occupy_more_than_it_was_granted() -> None:
    memory = memory_of()
    placement = place(memory, "a")
    assert placement is not None
    with pytest.raises(ValueError, match="3 of 2 chunks"):
        memory.loaded(placement.slot, AdapterLoad(10, 3), 1.0)


def test_a_failed_load_leaves_nothing() -> None:
    memory = memory_of(max_resident_adapters=1, max_adapter_bytes=10)
    placement = place(memory, "a")
    assert placement is not None
    memory.failed(placement.slot)
    assert (memory.arena.free, memory.residency.free_slots, memory.residency.used_bytes) == (32, 1, 0)
    assert held(memory) == set()


def test_idle_adapters_leave_for_kv_blocks_when_nothing_is_free_and_those_in_use_never() -> None:
    memory = memory_of(total_blocks=6)
    slot = load(memory, "a")
    load(memory, "b")
    memory.acquire("b")
    assert memory.available() == 4
    assert memory.take_blocks(5) is None
    assert held(memory) == {"a", "b"}
    blocks = memory.take_blocks(4)
    assert blocks is not None
    assert held(memory) == {"b"}
    assert memory.take_evicted() == (slot,)
    assert memory.take_evicted() == ()
    memory.drop_blocks(blocks)
    assert memory.arena.free == 4


def test_idle_adapters_leave_for_another_s_chunks_but_not_more_than_needed() -> None:
    memory = memory_of(total_blocks=6)
    for digest in "abc":
        load(memory, digest)
    assert place(memory, "d", 20) is not None  # 3 chunks
    assert held(memory) == {"c", "d"}
    assert memory.arena.free == 1


def test_a_reserve_for_kv_blocks_is_left() -> None:
    memory = memory_of(total_blocks=6)
    assert place(memory, "a", reserve=5) is None
    load(memory, "b")
    assert place(memory, "a", reserve=4) is not None
    assert held(memory) == {"a", "b"}  # b can still leave


def test_the_dearest_to_restore_per_chunk_stays() -> None:
    memory = memory_of(total_blocks=12)
    load(memory, "slow", seconds=4.0)
    load(memory, "quick", seconds=1.0)
    load(memory, "large", size=70, seconds=3.0)  # 8 chunks
    assert memory.take_blocks(1) is not None
    assert held(memory) == {"slow", "quick"}
    assert memory.take_blocks(8) is not None
    assert held(memory) == {"slow"}


def test_use_keeps_an_adapter_longer_but_not_for_ever() -> None:
    memory = memory_of(max_resident_adapters=2)
    load(memory, "often")
    for _ in range(5):
        use(memory, "often")
    for digest in "abc":
        load(memory, digest)
        assert held(memory) == {"often", digest}
    for number in range(20):
        load(memory, f"x{number}")
        use(memory, f"x{number}")
    assert "often" not in held(memory)


def test_of_equals_the_least_recently_used_leaves() -> None:
    memory = memory_of(max_resident_adapters=2)
    load(memory, "a")
    load(memory, "b")
    load(memory, "c")  # a left
    use(memory, "b")
    use(memory, "c")
    use(memory, "b")
    load(memory, "d")
    assert held(memory) == {"b", "d"}


def test_a_byte_limit_binds_beside_the_arena() -> None:
    memory = memory_of(max_adapter_bytes=30)
    slots = [load(memory, digest) for digest in "abc"]
    assert place(memory, "d", 20) is not None
    assert memory.take_evicted() == tuple(slots[:2])
    assert held(memory) == {"c", "d"}
    assert memory.residency.used_bytes == 30


def test_what_the_device_takes_counts_once_it_is_known() -> None:
    memory = memory_of(max_adapter_bytes=30)
    placement = place(memory, "a")
    assert placement is not None
    memory.loaded(placement.slot, AdapterLoad(25, 2), 1.0)
    load(memory, "b")
    assert held(memory) == {"b"}


def test_nothing_leaves_when_what_is_idle_is_not_enough() -> None:
    memory = memory_of(max_adapter_bytes=30, total_blocks=8)
    for digest in "abc":
        load(memory, digest)
    memory.acquire("a")
    assert place(memory, "d", 25) is None  # bytes
    assert place(memory, "d", 20, ("b",)) is None
    assert place(memory, "d", 10, ("b",), reserve=5) is None  # chunks: 2 are free and 2 of c, 2 would be taken
    assert held(memory) == {"a", "b", "c"}
    assert memory.take_evicted() == ()


def test_neither_loading_nor_referenced_nor_claimed_adapters_leave() -> None:
    memory = memory_of(max_resident_adapters=3)
    load(memory, "a")
    memory.acquire("a")
    load(memory, "b")
    assert place(memory, "c") is not None
    assert place(memory, "d", claimed=("b",)) is None
    assert place(memory, "d") is not None
    assert held(memory) == {"a", "c", "d"}
    assert place(memory, "e") is None


def test_misuse_is_told() -> None:
    memory = memory_of()
    placement = place(memory, "a")
    assert placement is not None
    with pytest.raises(ValueError, match="not resident"):
        memory.acquire("a")
    memory.loaded(placement.slot, AdapterLoad(10, 1), 1.0)
    with pytest.raises(ValueError, match="not being loaded"):
        memory.loaded(placement.slot, AdapterLoad(10, 1), 1.0)
    with pytest.raises(ValueError, match="no reference"):
        memory.release(placement.slot)


@pytest.mark.parametrize(("load_s", "stays"), [(0.3, False), (0.5, True)])
def test_adapters_and_prefixes_leave_in_one_order(load_s: float, stays: bool) -> None:
    """A block of 4 tokens is restored in 0.04 s at 100 tokens/s and was used 5 times: 0.2 s per chunk."""
    memory = memory_of(total_blocks=4)
    load(memory, "a", seconds=load_s)  # 2 chunks
    submit = Submit(1, (1, 2, 3, 4, 5), Sampling(), None, "default", 0.0)
    request = Request.from_submit(submit, sequence=1, max_known_tokens=9, chain_start=b"", adapter_on_device=False)
    blocks = memory.take_blocks(2)
    assert blocks is not None
    request.block_ids, request.computed_tokens = blocks, 5
    memory.publish(request, 5)
    for _ in range(4):
        memory.share(blocks[:1])
        memory.drop_blocks(blocks[:1])
    memory.drop_blocks(blocks)
    assert memory.available() == 4
    assert memory.take_blocks(2) is not None  # one is free
    assert (held(memory) == {"a"}) == stays
    assert bool(memory.find_prefix(request)) != stays
