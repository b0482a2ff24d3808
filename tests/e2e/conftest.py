from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.local_cluster import LocalCluster, local_cluster
from tests.tiny_adapters import write_adapter
from tests.tiny_base import write_tiny_base


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random base model; its id is `tiny`."""
    return write_tiny_base(tmp_path_factory.mktemp("base") / "tiny")


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
