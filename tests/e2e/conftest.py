from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.fleet import Fleet, running_fleet
from tests.e2e.fleet_calls import BASE
from tests.e2e.local_cluster import LocalCluster, local_cluster
from tests.tiny_adapters import write_adapter
from tests.tiny_base import write_tiny_base


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random base model; its id is `tiny`. Its context is long, so that no stream ends for want of room."""
    return write_tiny_base(tmp_path_factory.mktemp("base") / "tiny", max_position_embeddings=8192)


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> dict[str, Path]:
    """Random adapters of different ranks and modules, by name."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        "all-seven": write_adapter(root / "all-seven", tiny_base, rank=8, alpha=16, seed=1),
        "attention": write_adapter(root / "attention", tiny_base, rank=4, targets=["q_proj", "v_proj"], seed=2),
        "half": write_adapter(root / "half", tiny_base, rank=16, dtype="BF16", layers=[1], seed=3),
    }


@pytest.fixture(scope="session")
def cluster(tiny_base: Path, adapters: dict[str, Path]) -> Iterator[LocalCluster]:
    """A registry, a worker and a router in float32, with the adapters registered through the command line."""
    with local_cluster(tiny_base) as running:
        for name, folder in adapters.items():
            added = running.run("adapter", "add", name, folder)
            assert added.code == 0, added.err
        yield running


@pytest.fixture(scope="session")
def long_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny base model with a long context; streams of it last for seconds."""
    return write_tiny_base(tmp_path_factory.mktemp("base") / BASE, max_position_embeddings=32768)


@pytest.fixture(scope="session")
def long_adapter(tmp_path_factory: pytest.TempPathFactory, long_base: Path) -> Callable[[int], Path]:
    """A maker of adapters for `long_base`, each seed another one."""
    root = tmp_path_factory.mktemp("long-adapters")
    return lambda seed: write_adapter(root / str(seed), long_base, rank=4, seed=seed)


@pytest.fixture(scope="session")
def shared_fleet(long_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A registry, two workers and two routers as plain processes."""
    with running_fleet(long_base, tmp_path_factory.mktemp("fleet")) as running:
        yield running


@pytest.fixture
async def fleet(shared_fleet: Fleet) -> AsyncIterator[Fleet]:
    """The fleet, whole before the test and after it."""
    await shared_fleet.whole()
    yield shared_fleet
    await shared_fleet.whole()
