"""Adapter slots: byte budget, order of eviction, and misuse."""

from __future__ import annotations

import pytest

from worker.engine.residency import Residency
from worker.mailbox import AdapterFile


def file(digest: str, size: int = 10) -> AdapterFile:
    return AdapterFile(digest, f"/cache/{digest}", size)


def load(residency: Residency, digest: str, size: int = 10) -> int:
    placement = residency.place(file(digest, size), (), 0.0)
    assert placement is not None
    residency.loaded(placement.slot, size)
    return placement.slot


def held(residency: Residency) -> set[str]:
    return {adapter.artifact_digest for adapter in residency.view()}


def test_idle_adapters_leave_oldest_first_until_the_bytes_fit() -> None:
    residency = Residency(8, max_bytes=30)
    slots = [load(residency, digest) for digest in "abc"]
    placement = residency.place(file("d", 20), (), 0.0)
    assert placement is not None
    assert placement.evicted_slots == tuple(slots[:2])
    assert held(residency) == {"c", "d"}
    assert residency.used_bytes == 30


def test_use_makes_an_adapter_young() -> None:
    residency = Residency(2)
    load(residency, "a")
    load(residency, "b")
    residency.release(residency.acquire("a"))
    load(residency, "c")
    assert held(residency) == {"a", "c"}


def test_nothing_leaves_when_what_is_idle_is_not_enough() -> None:
    residency = Residency(8, max_bytes=30)
    for digest in "abc":
        load(residency, digest)
    residency.acquire("a")
    assert residency.place(file("d", 25), (), 0.0) is None
    assert residency.place(file("d", 20), {"b"}, 0.0) is None
    assert held(residency) == {"a", "b", "c"}


def test_neither_loading_nor_referenced_nor_claimed_adapters_leave() -> None:
    residency = Residency(3)
    load(residency, "a")
    residency.acquire("a")
    load(residency, "b")
    assert residency.place(file("c"), (), 0.0) is not None
    assert residency.place(file("d"), {"b"}, 0.0) is None
    placement = residency.place(file("d"), (), 0.0)
    assert placement is not None
    assert held(residency) == {"a", "c", "d"}
    assert residency.place(file("e"), (), 0.0) is None


def test_what_the_device_takes_counts_once_it_is_known() -> None:
    residency = Residency(4, max_bytes=30)
    placement = residency.place(file("a", 10), (), 0.0)
    assert placement is not None
    assert residency.used_bytes == 10
    residency.loaded(placement.slot, 25)
    assert residency.used_bytes == 25
    load(residency, "b", 10)
    assert held(residency) == {"b"}


def test_a_failed_load_leaves_nothing() -> None:
    residency = Residency(1, max_bytes=10)
    placement = residency.place(file("a"), (), 0.0)
    assert placement is not None
    residency.failed(placement.slot)
    assert (residency.used_bytes, residency.free_slots, held(residency)) == (0, 1, set())


def test_an_adapter_over_the_whole_budget_never_fits() -> None:
    assert not Residency(1, max_bytes=10).can_ever_hold(file("a", 11))
    assert Residency(1, max_bytes=10).can_ever_hold(file("a", 10))
    assert Residency(1).can_ever_hold(file("a", 10**12))


def test_misuse_is_told() -> None:
    residency = Residency(2)
    placement = residency.place(file("a"), (), 0.0)
    assert placement is not None
    with pytest.raises(ValueError, match="not resident"):
        residency.acquire("a")
    residency.loaded(placement.slot, 10)
    with pytest.raises(ValueError, match="not being loaded"):
        residency.loaded(placement.slot, 10)
    with pytest.raises(ValueError, match="no reference"):
        residency.release(placement.slot)
