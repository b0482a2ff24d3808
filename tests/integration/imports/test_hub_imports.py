"""Imports from a hub: one commit's files, by the registry's own token.

That the hub of these tests answers as one does, the hub's own library is asked.
"""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import huggingface_hub
import pytest

from loraplex import errors
from loraplex.registry.v1 import adapter_pb2 as a
from tests.file_server import COMMIT, Answer
from tests.running_registry import nothing_is_left, refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TOKEN = "hub-token-of-the-registry"


@pytest.fixture
def repo(hub, adapter_folder):
    hub.files.clear()
    hub.told.clear()
    hub.token = TOKEN
    hub.put_folder(adapter_folder)
    hub.put_folder(adapter_folder, "runs/last/")
    hub.server.requests.clear()
    hub.store.requests.clear()
    return hub


async def test_weights_of_another_digest_than_was_asked_for_are_refused(registry, state_dir, repo, adapter_folder):
    digest = hashlib.sha256((adapter_folder / WEIGHTS).read_bytes()).hexdigest()
    error = await refusal(registry.events("hf://acme/sql", weights_sha256="ab" * 32), errors.CorruptArtifact)
    assert error.field == "weights_sha256"
    assert digest[:12] in error.message
    assert await nothing_is_left(registry, state_dir)
    await registry.import_("hf://acme/sql", weights_sha256=digest)
    await delete(registry, "x")


async def delete(registry, *names):
    for name in names:
        await registry.adapters.DeleteAdapter(a.DeleteAdapterRequest(name=name))


async def test_the_hub_of_these_tests_is_one_for_the_hubs_own_library(repo, tmp_path, adapter_folder):
    def download() -> tuple[str, bytes]:
        api = huggingface_hub.HfApi(endpoint=repo.endpoint, token=TOKEN)
        info = api.model_info(repo.repo, files_metadata=True)
        weights = next(file for file in info.siblings or () if file.rfilename == WEIGHTS)
        path = api.hf_hub_download(repo.repo, WEIGHTS, local_dir=tmp_path)
        assert weights.lfs
        return weights.lfs.sha256, Path(path).read_bytes()

    sha256, raw = await asyncio.to_thread(download)
    assert raw == (adapter_folder / WEIGHTS).read_bytes()
    assert hashlib.sha256(raw).hexdigest() == sha256


@pytest.mark.parametrize(
    ("source", "stored"),
    [
        ("hf://acme/sql", f"hf://acme/sql@{COMMIT}"),
        ("hf://acme/sql@main", f"hf://acme/sql@{COMMIT}"),
        ("hf://acme/sql/runs/last@refs/pr/1", f"hf://acme/sql/runs/last@{COMMIT}"),
    ],
)
async def test_a_revision_is_resolved_to_its_commit_which_is_stored(registry, repo, adapter_folder, source, stored):
    registered = await registry.import_(source)
    uploaded = await registry.upload(adapter_folder, "uploaded")
    assert registered.adapter.current.source == stored
    assert registered.adapter.current.version_digest == uploaded.adapter.current.version_digest
    resolved = [request for request in repo.server.requests if "/resolve/" in request.path]
    assert {request.path.split("/resolve/")[1].partition("/")[0] for request in resolved} == {COMMIT}
    assert all(request.headers["authorization"] == f"Bearer {TOKEN}" for request in resolved)
    await delete(registry, "x", "uploaded")


async def test_weights_that_break_off_go_on_where_they_were_in_the_store(registry, repo, adapter_folder):
    raw = (adapter_folder / WEIGHTS).read_bytes()
    repo.store.put(repo.store_path(WEIGHTS), Answer(raw, until=5000, tagged=False), Answer(raw, tagged=False))
    await registry.import_("hf://acme/sql")
    asked = repo.store.asked(repo.store_path(WEIGHTS))
    assert [request.headers.get("range") for request in asked] == [None, "bytes=5000-"]
    assert asked[0].target.endswith("?signature=secret")
    assert not any("authorization" in request.headers for request in asked)
    await delete(registry, "x")


async def test_weights_that_are_not_what_the_hub_says_are_fetched_once_more_and_then_refused(
    registry, state_dir, repo, adapter_folder
):
    raw = (adapter_folder / WEIGHTS).read_bytes()
    damaged = raw[:-1] + bytes([raw[-1] ^ 1])
    path = repo.store_path(WEIGHTS)
    repo.store.put(path, Answer(damaged), Answer(raw))
    await registry.import_("hf://acme/sql")
    await delete(registry, "x")
    repo.store.put(path, Answer(damaged))
    error = await refusal(registry.events("hf://acme/sql"), errors.CorruptArtifact)
    assert hashlib.sha256(raw).hexdigest() in error.message
    repo.store.put(path, Answer(raw + b"more"))
    error = await refusal(registry.events("hf://acme/sql"), errors.CorruptArtifact)
    assert f"more than the {len(raw)} bytes" in error.message
    repo.store.put(path, Answer(raw[:-5]))
    error = await refusal(registry.events("hf://acme/sql"), errors.SourceUnreachable)
    assert f"truncated: {len(raw) - 5} of {len(raw)} bytes" in error.message
    assert await nothing_is_left(registry, state_dir)


@pytest.mark.parametrize(
    ("status", "code", "kind", "said"),
    [
        (401, "RepoNotFound", errors.SourceNotFound, "hf://acme/sql@main"),
        (404, "RevisionNotFound", errors.SourceNotFound, "hf://acme/sql@main"),
        (404, "", errors.SourceNotFound, "hf://acme/sql@main"),
        (403, "GatedRepo", errors.SourceForbidden, "gated"),
        (401, "", errors.SourceForbidden, "token"),
        (429, "", errors.SourceUnreachable, "429"),
        (503, "", errors.SourceUnreachable, "503"),
    ],
)
async def test_the_hubs_refusals_are_told_as_what_they_are(registry, repo, status, code, kind, said, monkeypatch):
    refused = Answer(b"{}", status, {"X-Error-Code": code} if code else {})
    monkeypatch.setitem(repo.server.acts, "/api/models/acme/sql/revision/main", [lambda _: refused])
    error = await refusal(registry.events("hf://acme/sql@main"), kind)
    assert said in error.message
    assert TOKEN not in error.message


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"sha": "../../x", "siblings": []}', b'{"sha": "abc"}'])
async def test_what_is_no_hub_is_told_so(registry, repo, body, monkeypatch):
    monkeypatch.setitem(repo.server.acts, "/api/models/acme/sql", [lambda _: Answer(body)])
    assert "hub" in (await refusal(registry.events("hf://acme/sql"), errors.SourceUnreachable)).message


async def test_a_repository_with_pickled_weights_says_what_to_do(registry, repo):
    del repo.files[WEIGHTS]
    await refusal(registry.events("hf://acme/sql"), errors.SourceNotFound)
    repo.put("adapter_model.bin", b"pickle")
    error = await refusal(registry.events("hf://acme/sql"), errors.UnsupportedAdapter)
    assert "adapter_model.bin" in error.message
