"""Imports from object stores: S3 as moto speaks it; of Google's and Azure's the two requests that an import makes."""

from __future__ import annotations

import logging
import urllib.request
from collections.abc import Iterator
from typing import Any

import obstore
import pytest
from moto.server import ThreadedMotoServer
from obstore.store import S3Store

from loraplex import errors
from loraplex.registry.v1 import adapter_pb2 as a
from tests.file_server import Answer, Request, file_server
from tests.running_registry import Client, nothing_is_left, refusal, registry_here

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    urllib.request.urlopen(urllib.request.Request(f"{url}/adapters", method="PUT")).close()
    yield url
    server.stop()


@pytest.fixture
def credentials(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "registry")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-registry")
    monkeypatch.setenv("AWS_REGION", "us-east-1")


async def same_as_uploaded(registry: Client, source, adapter_folder) -> a.UploadArtifactResponse:
    registered = await registry.import_(source)
    uploaded = await registry.upload(adapter_folder, "uploaded")
    assert registered.adapter.current.version_digest == uploaded.adapter.current.version_digest
    for name in ("x", "uploaded"):
        await registry.adapters.DeleteAdapter(a.DeleteAdapterRequest(name=name))
    return registered


async def test_s3(tmp_path, base_folder, adapter_folder, endpoint, credentials):
    bucket = S3Store("adapters", config={"endpoint": endpoint}, client_options={"allow_http": True})
    for file in adapter_folder.iterdir():
        await obstore.put_async(bucket, f"teams/a/sql/{file.name}", file.read_bytes())
    await obstore.put_async(bucket, f"half/{CONFIG}", (adapter_folder / CONFIG).read_bytes())
    state = tmp_path / "state"
    async with registry_here(state, s3_endpoint=endpoint) as registry:
        await registry.add_base(base_folder)
        for source in ("s3://adapters/teams/a/sql", "s3://adapters/teams/a/sql/"):
            registered = await same_as_uploaded(registry, source, adapter_folder)
            assert registered.adapter.current.source == "s3://adapters/teams/a/sql/"
        wrong = registry.events("s3://adapters/teams/a/sql", weights_sha256="ab" * 32)
        assert (await refusal(wrong, errors.CorruptArtifact)).field == "weights_sha256"
        for source, missing in (
            ("s3://adapters/half", f"s3://adapters/half/{WEIGHTS}"),
            ("s3://adapters", f"s3://adapters/{CONFIG}"),
            ("s3://no-such-bucket/x", f"s3://no-such-bucket/x/{CONFIG}"),
        ):
            assert missing in (await refusal(registry.events(source), errors.SourceNotFound)).message
        assert await nothing_is_left(registry, state)


async def test_s3_where_a_read_breaks_off_stands_still_or_finds_another_object(
    tmp_path, base_folder, adapter_folder, credentials
):
    raw = (adapter_folder / WEIGHTS).read_bytes()
    changed = Answer(raw[::-1], headers={"Last-Modified": "Mon, 30 Nov 2026 08:00:00 GMT"})
    state = tmp_path / "state"
    async with (
        file_server() as store,
        registry_here(state, s3_endpoint=store.base, import_stall_s=0.4) as registry,
    ):
        await registry.add_base(base_folder)
        dated = {"Last-Modified": "Mon, 30 Nov 2026 07:00:00 GMT"}
        path = f"/adapters/sql/{WEIGHTS}"
        store.put(f"/adapters/sql/{CONFIG}", Answer((adapter_folder / CONFIG).read_bytes(), headers=dated))

        def beginning_until_asked_for_the_rest(request: Request) -> Answer:
            stops: dict[str, Any] = {} if "range" in request.headers else {"until": 5000, "stalls": True}
            return Answer(raw, headers=dated, **stops)

        store.acts[path] = [beginning_until_asked_for_the_rest]
        await same_as_uploaded(registry, "s3://adapters/sql", adapter_folder)
        asked = store.asked(path)  # more than twice, where this machine stood still for longer than a store may
        assert asked[0].headers.get("range") is None
        assert asked[-1].headers["range"].startswith("bytes=")
        assert asked[-1].headers["if-match"]
        assert "Credential=registry/" in asked[0].headers["authorization"]
        # The object that is there now is another one: its store says 412, and it is read from its start.
        store.put(path, Answer(changed.body, headers=dated, until=5000), Answer(b"", 412), Answer(raw, headers=dated))
        await same_as_uploaded(registry, "s3://adapters/sql", adapter_folder)
        store.put(path, Answer(b"<Error><Code>AccessDenied</Code></Error>", 403))
        error = await refusal(registry.events("s3://adapters/sql"), errors.SourceForbidden)
        assert "secret-of-the-registry" not in error.message
        store.put(path, Answer(raw, headers=dated, announced=2**31, until=10))
        await refusal(registry.events("s3://adapters/sql"), errors.TooLarge)
        assert await nothing_is_left(registry, state)


@pytest.mark.parametrize(
    ("source", "setting", "environment", "folder"),
    [
        ("gs://adapters/sql", "gs_endpoint", {"GOOGLE_SKIP_SIGNATURE": "true"}, "/adapters/sql/"),
        (
            "az://adapters/sql",
            "az_endpoint",
            {"AZURE_STORAGE_ACCOUNT_NAME": "acme", "AZURE_STORAGE_ACCOUNT_KEY": "c2VjcmV0"},
            "/adapters/sql/",
        ),
    ],
)
async def test_google_and_azure_are_asked_for_two_objects(
    tmp_path, base_folder, adapter_folder, monkeypatch, source, setting, environment, folder
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    dated = {"Last-Modified": "Mon, 30 Nov 2026 07:00:00 GMT"}
    async with file_server() as store, registry_here(tmp_path / "state", **{setting: store.base}) as registry:
        await registry.add_base(base_folder)
        for file in adapter_folder.iterdir():
            store.put(folder + file.name, Answer(file.read_bytes(), headers=dated))
        registered = await same_as_uploaded(registry, source, adapter_folder)
        assert registered.adapter.current.source == f"{source}/"
        assert [request.method for request in store.requests] == ["GET", "GET"]
        store.put(folder + WEIGHTS, Answer(b"", 404))
        await refusal(registry.events(source), errors.SourceNotFound)
