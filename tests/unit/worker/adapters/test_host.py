"""The host tier: copies in memory that an allocator gives, within a budget, by what reading them again would cost."""

from __future__ import annotations

from pathlib import Path
from threading import Barrier, Thread

import numpy as np
import pytest
from numpy.typing import NDArray

from common.adapter_format.packed import PackedAdapter, PackedModule, open_packed, pack, quantized_module
from common.adapter_format.parts import PackedPart
from loraplex.errors import CorruptArtifact
from worker.adapters.host import HostTier, arrays_of, copied


class Locked:
    """Stands for the driver: counts what it gave, and gives no more than it has."""

    def __init__(self, most: int = 10**9) -> None:
        self.most = most
        self.given: list[int] = []

    def __call__(self, num_bytes: int) -> NDArray[np.uint8]:
        if sum(self.given) + num_bytes > self.most:
            raise RuntimeError("CUDA error: out of memory")
        self.given.append(num_bytes)
        return np.zeros(num_bytes, np.uint8)


def adapter(seed: int, form: str = "none") -> PackedAdapter:
    rng = np.random.default_rng(seed)
    if form == "none":
        a, b = rng.standard_normal((2, 16), np.float32), rng.standard_normal((16, 2), np.float32)
        module = PackedModule("layers.0.self_attn.q_proj", 2, 0.5, "F32", a, b)
    else:
        values = [rng.integers(-127, 128, (2, 16)).astype(np.int8) for _ in range(2)]
        scale = rng.random(2, np.float32)
        module = quantized_module("layers.0.self_attn.q_proj", (PackedPart("int8", 2, scale, "I8", *values),))
    return PackedAdapter("aa" * 32, "bb" * 32, form, (module,))


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Eight files; each adapter has two arrays of 128 bytes."""
    made = [tmp_path / f"digest{number}" for number in range(8)]
    for number, file in enumerate(made):
        pack(adapter(number), file)
    return made


def test_an_adapter_comes_from_its_file_once_and_from_memory_afterwards(files):
    tier = HostTier(10**6, Locked())
    first = tier.open(files[0])
    files[0].unlink()
    again = tier.open(files[0])
    assert again is first
    assert tier.used_bytes == 256
    changes = tier.take_changes()
    assert (changes.used_bytes, changes.came, changes.gone) == (256, ("digest0",), ())
    assert tier.take_changes().came == ()


@pytest.mark.parametrize("form", ["none", "int8"])
def test_a_copy_is_the_same_adapter_in_the_allocators_memory_aligned_and_read_only(tmp_path, form):
    pack(adapter(3, form), tmp_path / "file")
    packed = open_packed(tmp_path / "file")
    size = sum(-(-array.nbytes // 64) * 64 for array in arrays_of(packed))
    memory = np.zeros(size, np.uint8)
    copy = copied(packed, memory)
    originals, copies = list(arrays_of(packed)), list(arrays_of(copy))
    assert len(originals) == len(copies) > 1
    for original, mine in zip(originals, copies, strict=True):
        assert mine.dtype == original.dtype
        np.testing.assert_array_equal(mine, original)
        assert not mine.size or np.shares_memory(mine, memory)
        assert (mine.ctypes.data - memory.ctypes.data) % 64 == 0
        assert not mine.flags.writeable
    assert (copy.version_digest, copy.modules[0].name) == (packed.version_digest, packed.modules[0].name)


def test_the_budget_holds_and_what_is_used_often_outlasts_the_rest(files):
    times = iter(range(1000))
    tier = HostTier(3 * 256, Locked(), clock=lambda: float(next(times)))
    for _ in range(3):
        tier.open(files[0])
    for file in files[1:4]:
        tier.open(file)
        assert tier.used_bytes <= 3 * 256
    held = set(tier._copies)
    assert held == {"digest0", "digest2", "digest3"}
    assert tier.take_changes().gone == ("digest1",)
    for file in files[1:]:
        tier.open(file)
    for file in files[1:]:
        tier.open(file)
    assert "digest0" not in tier._copies  # nothing lasts for ever


def test_one_that_is_larger_than_the_budget_or_finds_no_memory_is_loaded_all_the_same(files):
    small = HostTier(255, Locked())
    assert small.open(files[0]).modules
    assert (small.used_bytes, small.take_changes().came) == (0, ())
    full = HostTier(10**6, Locked(most=300))
    assert full.open(files[0]).modules
    assert full.open(files[1]).modules
    assert (full.used_bytes, full.take_changes().came) == (256, ("digest0",))


def test_a_file_that_is_damaged_or_could_not_be_loaded_leaves_no_copy(files):
    tier = HostTier(10**6, Locked())
    tier.open(files[0])
    tier.forget(files[0].name)
    tier.forget(files[1].name)
    assert (tier.used_bytes, tier._copies) == (0, {})
    files[2].write_bytes(b"damaged")
    with pytest.raises(CorruptArtifact):
        tier.open(files[2])
    assert tier.used_bytes == 0


def test_what_does_not_fit_beside_a_copy_that_is_being_made_is_loaded_without_one(files):
    locked = Locked()
    tier = HostTier(300, Locked())  # room for one, and it is on its way

    def another_comes_meanwhile(num_bytes: int) -> NDArray[np.uint8]:
        tier._allocate = locked
        assert tier.open(files[1]).modules
        assert (tier.used_bytes, tier._copies) == (256, {})
        return locked(num_bytes)

    tier._allocate = another_comes_meanwhile
    tier.open(files[0])
    assert (tier.used_bytes, list(tier._copies)) == (256, ["digest0"])


def test_threads_that_open_at_once_keep_one_copy_and_the_count(files):
    tier, barrier = HostTier(10**6, Locked()), Barrier(4)

    def work() -> None:
        barrier.wait()
        for file in files:
            tier.open(file)

    threads = [Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tier.used_bytes == 8 * 256 == sum(copy.num_bytes for copy in tier._copies.values())
    assert sorted(tier.take_changes().came) == [file.name for file in files]
