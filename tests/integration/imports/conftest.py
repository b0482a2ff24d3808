"""Bases, adapters and a registry that may import from this machine's servers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from common.backoff import Backoff
from registry.service import fetching
from tests.file_server import FileServer, HubServer, file_server
from tests.running_registry import Client, registry_here
from tests.tiny_adapters import write_adapter
from tests.tiny_base import write_tiny_base


@pytest.fixture(scope="module", autouse=True)
def short_pauses():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetching, "PAUSE", Backoff(first_s=0.01, longest_s=0.02))
        yield


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory):
    return write_tiny_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapter_folder(tmp_path_factory, base_folder):
    return write_adapter(tmp_path_factory.mktemp("adapter"), base_folder, seed=1)


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def import_root(tmp_path_factory):
    return tmp_path_factory.mktemp("root")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[FileServer]:
    async with file_server() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def store() -> AsyncIterator[FileServer]:
    """Where the hub has its large files: another host."""
    async with file_server(host="127.0.0.2") as running:
        yield running


@pytest.fixture(scope="module")
def hub(server, store) -> HubServer:
    return HubServer(server, store)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def registry(state_dir, base_folder, import_root, hub) -> AsyncIterator[Client]:
    async with registry_here(
        state_dir,
        import_schemes="hf,https,http,s3,gs,az",
        import_private_hosts="127.0.0.1,127.0.0.2",
        import_root=import_root,
        max_upload_bytes=2**24,
        hf_endpoint=hub.endpoint,
        hf_token="hub-token-of-the-registry",
    ) as client:
        await client.add_base(base_folder)
        yield client
