"""The registry over a real socket: registration, look-up, download, deletion, lists."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import AsyncIterator

import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.adapter_format.packed import open_packed
from loraplex import errors
from loraplex.manifest import read_manifest
from loraplex.registry.v1 import adapter_pb2 as a
from loraplex.registry.v1 import base_model_pb2 as b
from tests.running_registry import (
    Client,
    refusal,
    registry_here,
    stored_files,
)
from tests.tiny_adapters import adapter_tensors, write_adapter
from tests.tiny_base import write_tiny_base

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory):
    return write_tiny_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapter_folder(tmp_path_factory, base_folder):
    return write_adapter(tmp_path_factory.mktemp("adapter"), base_folder, seed=1)


@pytest.fixture
def state_dir(tmp_path):
    return tmp_path / "state"


@pytest.fixture
async def empty_registry(state_dir, database_url) -> AsyncIterator[Client]:
    async with registry_here(state_dir, database_url, max_upload_bytes=2**24) as client:
        yield client


@pytest.fixture
async def registry(empty_registry: Client, base_folder) -> Client:
    await empty_registry.add_base(base_folder)
    return empty_registry


# --- registration ---------------------------------------------------------------------------------------------------


async def test_an_adapter_is_registered_found_and_downloaded(registry, adapter_folder, base_folder, tmp_path):
    answer = await registry.upload(adapter_folder, "first", "tiny")
    current = answer.adapter.current
    assert (answer.revision, answer.changed) == (2, True)
    assert (answer.adapter.tenant, answer.adapter.name, answer.adapter.base_id) == ("default", "first", "tiny")
    assert current.base_digest == read_manifest(base_folder).digest()
    assert (current.rank, current.num_modules, current.num_base_modules) == (4, 14, 14)
    assert (current.format, current.dtype) == ("none", "F32")
    assert list(answer.adapter.versions) == [current]

    found = await registry.adapters.GetAdapter(a.GetAdapterRequest(name="first"))
    assert found.adapter == answer.adapter
    listed = await registry.adapters.ListAdapters(a.ListAdaptersRequest())
    assert list(listed.adapters) == [answer.adapter]

    size, raw = await registry.download(current.artifact_digest)
    assert size == len(raw) == current.artifact_bytes
    assert hashlib.sha256(raw).hexdigest() == current.artifact_digest
    (tmp_path / "packed").write_bytes(raw)
    packed = open_packed(tmp_path / "packed")
    assert packed.version_digest == current.version_digest
    tensors = adapter_tensors(base_folder, seed=1)
    for module in packed.modules:
        assert np.array_equal(module.b, tensors[f"base_model.model.model.{module.name}.lora_B.weight"][1])


async def test_download_goes_on_from_an_offset(registry, adapter_folder):
    digest = (await registry.upload(adapter_folder, "x")).adapter.current.artifact_digest
    size, whole = await registry.download(digest)
    assert await registry.download(digest, 1000) == (size, whole[1000:])
    assert await registry.download(digest, size) == (size, b"")
    await refusal(registry.download(digest, size + 1), errors.InvalidParameter)
    await refusal(registry.download(digest, 2**64 - 1), errors.InvalidParameter)


async def test_versions_cut_over_and_back(registry, adapter_folder, base_folder, tmp_path):
    first = (await registry.upload(adapter_folder, "x")).adapter.current
    other = write_adapter(tmp_path / "other", base_folder, seed=2, rank=8)
    second = await registry.upload(other, "x")
    assert second.changed
    assert second.adapter.current.rank == 8
    assert [v.version_digest for v in second.adapter.versions] == [
        second.adapter.current.version_digest,
        first.version_digest,
    ]
    again = await registry.upload(other, "x")
    assert (again.changed, again.revision) == (False, second.revision)
    assert again.adapter == second.adapter

    back = await registry.upload(adapter_folder, "x")
    assert (back.changed, back.revision) == (True, second.revision + 1)
    assert back.adapter.current == first
    assert list(back.adapter.versions) == list(second.adapter.versions)
    for version in back.adapter.versions:
        await registry.download(version.artifact_digest)


async def test_the_same_content_under_two_names_is_stored_once(registry, adapter_folder, state_dir):
    one, two = [await registry.upload(adapter_folder, name) for name in ("one", "two")]
    assert one.adapter.current.artifact_digest == two.adapter.current.artifact_digest
    assert len(stored_files(state_dir)) == 1
    await registry.adapters.DeleteAdapter(a.DeleteAdapterRequest(name="one"))
    await registry.download(two.adapter.current.artifact_digest)
    await registry.adapters.DeleteAdapter(a.DeleteAdapterRequest(name="two"))
    assert stored_files(state_dir) == []


async def test_concurrent_uploads_of_one_name_and_many_names_all_land(registry, base_folder, tmp_path):
    folders = [write_adapter(tmp_path / str(i), base_folder, seed=i, targets=("q_proj",)) for i in range(6)]
    answers = await asyncio.gather(
        *(registry.upload(folder, "same") for folder in folders),
        *(registry.upload(folder, f"own-{i}") for i, folder in enumerate(folders)),
    )
    assert sorted(answer.revision for answer in answers) == list(range(2, 14))
    same = (await registry.adapters.GetAdapter(a.GetAdapterRequest(name="same"))).adapter
    assert len(same.versions) == 6
    last = max((answer for answer in answers if answer.adapter.name == "same"), key=lambda answer: answer.revision)
    assert same == last.adapter


async def test_an_artifact_that_was_lost_comes_back_by_registering_again(registry, adapter_folder, state_dir):
    digest = (await registry.upload(adapter_folder, "x")).adapter.current.artifact_digest
    shutil.rmtree(state_dir / "artifacts" / digest[:2])
    error = await refusal(registry.download(digest), errors.ArtifactUnreachable)
    assert error.metadata["artifact_digest"] == digest
    assert not (await registry.upload(adapter_folder, "x")).changed
    await registry.download(digest)


async def test_deleting_removes_the_artifact_but_not_from_under_a_download(registry, base_folder, tmp_path, state_dir):
    # 16 MB: more than the connection's buffers hold, so most of it is read after the deletion.
    folder = write_adapter(tmp_path / "big", base_folder, rank=1200)
    version = (await registry.upload(folder, "x")).adapter.current
    assert version.artifact_bytes > 8 * 2**20
    call = registry.adapters.DownloadArtifact(a.DownloadArtifactRequest(artifact_digest=version.artifact_digest))
    parts = aiter(call)
    assert (await anext(parts)).info.size_bytes == version.artifact_bytes
    deleted = await registry.adapters.DeleteAdapter(a.DeleteAdapterRequest(name="x"))
    assert deleted.revision == 3
    assert stored_files(state_dir) == []
    raw = b"".join([part.data async for part in parts])
    assert hashlib.sha256(raw).hexdigest() == version.artifact_digest
    await refusal(registry.download(version.artifact_digest), errors.ArtifactNotFound)
    await refusal(registry.adapters.GetAdapter(a.GetAdapterRequest(name="x")), errors.AdapterNotFound)
    await refusal(registry.adapters.DeleteAdapter(a.DeleteAdapterRequest(name="x")), errors.AdapterNotFound)


# --- lists ----------------------------------------------------------------------------------------------------------


async def test_lists_come_in_pages_by_name(registry, adapter_folder, base_folder):
    names = ["a", "a-b", "a.b", "a0", "b", "b_c"]
    for name in reversed(names):
        await registry.upload(adapter_folder, name, "tiny")
        await registry.add_base(base_folder, f"Owner/{name}")
    pages, token = [], ""
    while True:
        page = await registry.adapters.ListAdapters(a.ListAdaptersRequest(page_size=2, page_token=token))
        pages.append([adapter.name for adapter in page.adapters])
        token = page.next_page_token
        if not token:
            break
    assert pages == [names[0:2], names[2:4], names[4:6]]

    first = await registry.bases.ListBaseModels(b.ListBaseModelsRequest(page_size=6))
    rest = await registry.bases.ListBaseModels(b.ListBaseModelsRequest(page_token=first.next_page_token))
    found = [base.base_id for base in (*first.base_models, *rest.base_models)]
    assert found == [*(f"Owner/{name}" for name in names), "tiny"]
    assert rest.next_page_token == ""


async def test_bad_pages_are_refused(registry, adapter_folder):
    for name in ("a", "b"):
        await registry.upload(adapter_folder, name)
    good = (await registry.adapters.ListAdapters(a.ListAdaptersRequest(page_size=1))).next_page_token
    for token in ("x", "%%", good[:-2], f"{good}x", f"{good}=", "YmFzZXM6YQ", "ä", "A" * 10_000, "YWRhcHRlcnM6AA"):
        error = await refusal(
            registry.adapters.ListAdapters(a.ListAdaptersRequest(page_token=token)), errors.InvalidParameter
        )
        assert error.field == "page_token"
    await refusal(registry.bases.ListBaseModels(b.ListBaseModelsRequest(page_token=good)), errors.InvalidParameter)
    for call in (
        registry.adapters.ListAdapters(a.ListAdaptersRequest(page_size=1001)),
        registry.bases.ListBaseModels(b.ListBaseModelsRequest(page_size=2**32 - 1)),
    ):
        assert (await refusal(call, errors.InvalidParameter)).field == "page_size"


async def test_health_says_serving(registry):
    health = health_pb2_grpc.HealthStub(registry.channel)
    for service in ("", "loraplex.registry.v1.AdapterService", "loraplex.registry.v1.BaseModelService"):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
