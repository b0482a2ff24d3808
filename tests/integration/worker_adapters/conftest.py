"""One front end with a real engine process for most tests of a file."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.tiny_base import write_tiny_base
from tests.worker_front import ArtifactServer, Front, running_front, serving_artifacts
from tests.worker_steering import Steer


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_tiny_base(tmp_path_factory.mktemp("adapters") / "base")


@pytest.fixture(scope="module", name="served")
def fixture_served() -> ArtifactServer:
    return ArtifactServer()  # type: ignore[abstract]  # it serves downloads alone


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="shared")
async def fixture_shared(base, served, tmp_path_factory) -> AsyncIterator[Front]:
    cache = tmp_path_factory.mktemp("cache")
    async with (
        serving_artifacts(served) as port,
        running_front(base, cache, registry_port=port, max_resident_adapters=3) as running,
    ):
        yield running


@pytest.fixture
def artifacts(served: ArtifactServer) -> ArtifactServer:
    """The artifacts of all tests, with nothing said of this one's yet."""
    served.opened.clear()
    served.break_after.clear()
    served.gate, served.gate_at = None, 0
    return served


@pytest_asyncio.fixture(loop_scope="module", name="front")
async def fixture_front(shared) -> AsyncIterator[Front]:
    """One front end for most tests, which each leaves as it found it: without adapters."""
    yield shared
    sentences = shared.app._access.quarantine._sentences
    for digest in list(sentences):
        del sentences[digest]
        shared.app._adapter_changed(digest)
    status = await shared.status_where(
        lambda fields: not any(adapter.in_flight or adapter.loading for adapter in fields["adapters"].values())
    )
    for digest in status["adapters"]:
        await Steer(shared).pin(digest, pinned=False)
        await Steer(shared).unload(digest, from_disk=True)
    await shared.status_where(lambda fields: not fields["adapters"])


@pytest.fixture
def steer(front: Front) -> Steer:
    return Steer(front)
