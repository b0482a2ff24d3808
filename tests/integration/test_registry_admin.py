"""A registry's admin port: readiness, what is stored, who is connected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx2
import pytest

from common.http_server import bind
from loraplex.errors import FailedPrecondition
from loraplex.registry.v1 import adapter_pb2
from tests.admin_ports import taken_admin_ports
from tests.running_registry import Client, registry_here
from tests.tiny_adapters import write_adapter
from tests.tiny_base import write_tiny_base


@pytest.fixture
async def served(tmp_path, database_url, monkeypatch) -> AsyncIterator[tuple[Client, httpx2.AsyncClient]]:
    ports = taken_admin_ports(monkeypatch, "registry")
    monkeypatch.setattr("registry.metrics._DATABASE_WAIT_S", 60.0)
    async with (
        registry_here(tmp_path / "state", database_url, admin_port=0) as registry,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{ports[0]}", timeout=60) as http,
    ):
        yield registry, http


async def until_nothing_is_held(http: httpx2.AsyncClient) -> None:
    """Wait until the registry has noticed that the calls have ended; their callers may know it before."""
    async with asyncio.timeout(30):
        while (held := (await http.get("/debug/resources")).json())["streams"] or held["tasks"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_the_admin_port_tells_what_is_stored_and_who_watches(served, tmp_path):
    registry, http = served
    base = write_tiny_base(tmp_path / "base")
    assert (await http.get("/readyz")).status_code == 200
    await registry.add_base(base)
    for name, seed in (("one", 1), ("one", 2), ("two", 2)):  # the last two share their artifact
        await registry.upload(write_adapter(tmp_path / f"{name}{seed}", base, seed=seed), name)
    one = (await registry.adapters.GetAdapter(adapter_pb2.GetAdapterRequest(name="one"))).adapter
    sizes = [version.artifact_bytes for version in one.versions]
    watch = registry.adapters.Watch(adapter_pb2.WatchRequest())
    await watch.read()
    await until_nothing_is_held(http)  # a watch stands, it serves no request
    lines = (await http.get("/metrics")).text.splitlines()
    watch.cancel()
    assert "loraplex_registry_database_up 1.0" in lines
    assert "loraplex_registry_base_models 1.0" in lines
    assert "loraplex_registry_adapters 2.0" in lines
    assert "loraplex_registry_adapter_versions 3.0" in lines
    assert f"loraplex_registry_artifact_bytes {float(sum(sizes))}" in lines
    assert "loraplex_registry_watchers 1.0" in lines
    assert "loraplex_registry_uploads_in_progress 0.0" in lines
    assert "loraplex_registry_head_revision 4.0" in lines
    upload = 'method="/loraplex.registry.v1.AdapterService/UploadArtifact"'
    assert f'loraplex_rpc_requests_total{{code="OK",{upload}}} 3.0' in lines


async def test_a_taken_admin_port_ends_the_start_and_names_the_flag(tmp_path):
    with bind("127.0.0.1", 0, "--none") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(FailedPrecondition, match=f"{port}.*--admin-port"):
            async with registry_here(tmp_path / "state", admin_port=port):
                pass
