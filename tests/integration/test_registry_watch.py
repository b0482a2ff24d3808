"""The catalog stream: snapshots, resumption, no gaps, heartbeats, and the end of the service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import grpc
import pytest
from grpc import aio

from loraplex import errors
from loraplex.registry.v1 import adapter_pb2 as a
from tests.running_registry import Client, registry_here
from tests.tiny_adapters import write_adapter
from tests.tiny_base import write_tiny_base
from tests.watched_catalog import Catalog


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory):
    return write_tiny_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapter_folders(tmp_path_factory, base_folder):
    root = tmp_path_factory.mktemp("adapters")
    return [write_adapter(root / str(i), base_folder, seed=i, targets=("q_proj",), rank=1) for i in range(3)]


@pytest.fixture
async def registry(tmp_path, base_folder, database_url) -> AsyncIterator[Client]:
    async with registry_here(tmp_path / "state", database_url, keep_changes=5, heartbeat_s=0.2) as client:
        await client.add_base(base_folder)
        yield client


async def test_a_new_watcher_gets_the_whole_catalog_and_then_each_change(registry, adapter_folders):
    await registry.upload(adapter_folders[0], "one")
    await registry.upload(adapter_folders[1], "one")
    await registry.upload(adapter_folders[0], "two")
    catalog = Catalog()
    await catalog.sync(registry)
    assert catalog.seen == ["snapshot", "synced"]
    assert (catalog.revision, catalog.bases, set(catalog.adapters)) == (4, {"tiny"}, {"one", "two"})
    assert len(catalog.adapters["one"].versions) == 2

    following = asyncio.create_task(catalog.follow(registry, lambda catalog: catalog.revision == 6))
    three = await registry.upload(adapter_folders[2], "three")
    await registry.adapters.DeleteAdapter(a.DeleteAdapterRequest(name="one"))
    await following
    assert set(catalog.adapters) == {"two", "three"}
    assert catalog.adapters["three"] == three.adapter


async def test_an_empty_catalog_is_synced_too(tmp_path, database_url):
    async with registry_here(tmp_path / "state", database_url) as client:
        catalog = Catalog()
        await catalog.sync(client)
        assert (catalog.seen, catalog.revision) == (["synced"], 0)
        assert catalog.store_id


async def test_a_change_reaches_the_watcher_at_once(tmp_path, base_folder, database_url, monkeypatch):
    monkeypatch.setattr("registry.head_follower._LOOK_EVERY_S", 600.0)  # neither this nor a heartbeat tells of it
    async with registry_here(tmp_path / "state", database_url, heartbeat_s=600) as registry:
        call = Catalog().watch(registry)
        events = aiter(call)
        assert (await anext(events)).HasField("synced")
        await registry.add_base(base_folder)
        assert (await anext(events)).HasField("change")
        call.cancel()


async def test_an_idle_watcher_hears_a_heartbeat_with_the_head(registry):
    catalog = Catalog()
    await catalog.follow(registry, lambda catalog: catalog.seen.count("heartbeat") == 3)
    assert catalog.seen == ["snapshot", "synced", "heartbeat", "heartbeat", "heartbeat"]


async def test_a_watcher_resumes_where_it_was_without_a_gap(registry, adapter_folders):
    catalog = Catalog()
    await catalog.sync(registry)
    for name in ("one", "two", "three"):
        await registry.upload(adapter_folders[0], name)
    await catalog.follow(registry, lambda catalog: catalog.revision == 4)
    assert catalog.seen == ["snapshot", "synced", "resumed", "change", "change", "change"]
    assert set(catalog.adapters) == {"one", "two", "three"}
    await catalog.sync(registry)
    assert catalog.seen[-1] == "resumed"


@pytest.mark.parametrize(
    ("store_id", "revision"),
    [
        ("another store", 1),
        ("", 0),
        (None, 1),  # compacted
        (None, 1000),  # ahead of head
        (None, 2**64 - 1),
    ],
)
async def test_what_cannot_be_resumed_gets_a_snapshot(registry, adapter_folders, store_id, revision):
    catalog = Catalog()
    await catalog.sync(registry)
    for name in "abcdefg":  # the log keeps 5
        await registry.upload(adapter_folders[0], name)
    catalog.store_id = catalog.store_id if store_id is None else store_id
    catalog.revision = revision
    catalog.seen.clear()
    await catalog.sync(registry)
    assert catalog.seen == ["snapshot", "synced"]
    assert (catalog.revision, set(catalog.adapters)) == (8, set("abcdefg"))


async def test_the_log_keeps_as_many_changes_as_it_was_told(registry, adapter_folders):
    catalog = Catalog()
    await catalog.sync(registry)
    for name in "abcdefg":
        await registry.upload(adapter_folders[0], name)
    for revision, answer in ((3, "resumed"), (2, "snapshot")):  # head is 8, changes 4 to 8 are kept
        catalog.revision = revision
        event = await anext(aiter(catalog.watch(registry)))
        assert event.WhichOneof("event") == answer


async def test_a_restart_keeps_the_store_and_watchers_resume(tmp_path, database_url, base_folder, adapter_folders):
    catalog = Catalog()
    async with registry_here(tmp_path / "state", database_url) as client:
        await client.add_base(base_folder)
        await client.upload(adapter_folders[0], "one")
        await catalog.sync(client)
    store_id = catalog.store_id
    async with registry_here(tmp_path / "state", database_url) as client:
        await client.upload(adapter_folders[1], "two")
        await catalog.follow(client, lambda catalog: catalog.revision == 3)
        digest = catalog.adapters["one"].current.artifact_digest
        await client.download(digest)
    assert catalog.seen == ["snapshot", "synced", "resumed", "change"]
    assert (catalog.store_id, set(catalog.adapters)) == (store_id, {"one", "two"})


async def test_concurrent_writers_leave_no_gap_for_any_watcher(tmp_path, database_url, base_folder, adapter_folders):
    async with registry_here(tmp_path / "state", database_url, heartbeat_s=0.01) as client:
        await client.add_base(base_folder)

        async def writer(name: str) -> None:
            for folder in adapter_folders:
                await client.upload(folder, name)
            await client.adapters.DeleteAdapter(a.DeleteAdapterRequest(name=name))
            await client.upload(adapter_folders[0], name)

        async def reconnecting(catalog: Catalog) -> None:
            while catalog.revision < 21:
                start = catalog.revision
                await catalog.follow(client, lambda catalog, start=start: catalog.revision in (start + 3, 21))

        catalogs = [Catalog() for _ in range(4)]
        async with asyncio.TaskGroup() as tasks:
            for catalog in catalogs[:3]:
                tasks.create_task(catalog.follow(client, lambda catalog: catalog.revision == 21))
            tasks.create_task(reconnecting(catalogs[3]))
            for i in range(4):
                tasks.create_task(writer(f"n{i}"))
        truth = Catalog()
        await truth.sync(client)
    assert truth.revision == 21
    assert all(catalog.adapters == truth.adapters for catalog in catalogs)


async def test_a_large_catalog_comes_in_parts(tmp_path, database_url, base_folder, adapter_folders, monkeypatch):
    monkeypatch.setattr("registry.service.watches._PART_BYTES", 1000)
    async with registry_here(tmp_path / "state", database_url) as client:
        await client.add_base(base_folder)
        for i in range(12):
            await client.upload(adapter_folders[0], f"n{i}")
        catalog = Catalog()
        await catalog.sync(client)
    assert catalog.seen.count("snapshot") > 3
    assert len(catalog.adapters) == 12


async def test_draining_ends_watches_at_once(tmp_path, database_url):
    async with registry_here(tmp_path / "state", database_url, drain_timeout_s=600) as client:
        call = Catalog().watch(client)
        events = aiter(call)
        assert (await anext(events)).HasField("synced")
        # The block's end stops the service; the open watch must not hold it for the drain's 600 s.
        ended = asyncio.create_task(_end_of(events))
        kept = _Kept(client.channel)
        client.channel = cast("aio.Channel", kept)
    with pytest.raises(grpc.RpcError) as caught:
        await ended
    assert type(errors.from_rpc_error(caught.value)) is errors.Draining
    await kept.really_close()


async def _end_of(events) -> None:
    async for _ in events:
        pass


class _Kept:
    """A channel that outlives the block, to see how the server ends the stream."""

    def __init__(self, channel: aio.Channel) -> None:
        self._channel = channel

    async def close(self) -> None:
        pass

    async def really_close(self) -> None:
        await self._channel.close()
