"""A registry whose database knows artifacts that its folder lacks: a second one on a database, or a lost folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from loraplex import errors
from loraplex.registry.v1 import adapter_pb2 as a
from tests.running_registry import refusal, registry_here
from tests.tiny_adapters import write_adapter
from tests.tiny_base import write_tiny_base
from worker.adapters.source import RegistrySource


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapter_folder(tmp_path_factory: pytest.TempPathFactory, base_folder: Path) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapter") / "x", base_folder, targets=("q_proj",), rank=1)


@pytest.fixture
def logged() -> Iterator[list]:
    with capture_logs() as lines:
        yield lines


def missing(logged: list) -> list[dict]:
    return [line for line in logged if line["event"] == "registry.artifacts_missing"]


async def test_a_second_registry_on_a_database_names_artifact_folder_and_remedy(
    tmp_path, base_folder, adapter_folder, logged
):
    url = f"sqlite:///{tmp_path / 'shared.sqlite3'}"
    async with registry_here(tmp_path / "one", url) as one, registry_here(tmp_path / "two", url) as two:
        await one.add_base(base_folder)
        digest = (await one.upload(adapter_folder, "x")).adapter.current.artifact_digest
        assert (await two.adapters.GetAdapter(a.GetAdapterRequest(name="x"))).adapter.name == "x"
        error = await refusal(two.download(digest), errors.ArtifactUnreachable)
        for told in (digest, str(tmp_path / "two" / "artifacts"), "stop the other registry", "loraplex adapter add"):
            assert told in error.message
        assert error.metadata["artifact_digest"] == digest
        await refusal(two.download("0" * 64), errors.ArtifactNotFound)  # what nobody has registered
        async with RegistrySource(two.address) as source:  # a worker asks no second time, and tells clients no folder
            with pytest.raises(errors.ArtifactUnreachable, match="registered, but the registry") as caught:
                async with source.open(digest, 0):
                    pass
        assert str(tmp_path) not in caught.value.message
        (said,) = [line for line in logged if line["event"] == "registry.artifact_missing"]
        assert str(tmp_path / "two" / "artifacts") in said["registry"]
        assert not (await two.upload(adapter_folder, "x")).changed  # brings the file
        assert await two.download(digest) == await one.download(digest)
    assert missing(logged) == []  # there was nothing yet when they started


async def test_a_registry_whose_folder_was_lost_says_so_at_its_start(tmp_path, base_folder, adapter_folder, logged):
    state_dir = tmp_path / "state"
    async with registry_here(state_dir) as registry:
        await registry.add_base(base_folder)
        digest = (await registry.upload(adapter_folder, "x")).adapter.current.artifact_digest
    async with registry_here(state_dir):
        assert missing(logged) == []
    shutil.rmtree(state_dir / "artifacts")
    async with registry_here(state_dir) as registry:
        (line,) = missing(logged)
        assert (line["count"], line["first"], line["folder"]) == (1, digest, str(state_dir / "artifacts"))
        assert "give back the folder" in line["remedy"]
        await registry.upload(adapter_folder, "x")
        assert (await registry.download(digest))[0] > 0
    logged.clear()
    async with registry_here(state_dir):
        assert missing(logged) == []
