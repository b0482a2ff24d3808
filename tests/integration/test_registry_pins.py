"""Pins and limits on a real registry: stored, watched, kept over versions and restarts; refused by field."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from loraplex import errors
from loraplex.pins import PIN_ON_ALL
from loraplex.registry.v1 import adapter_pb2 as a
from tests.running_registry import Client, refusal, registry_here
from tests.tiny_adapters import write_adapter
from tests.tiny_base import write_tiny_base

Registry = Callable[..., AbstractAsyncContextManager[Client]]


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory) -> Path:
    return write_tiny_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory, base_folder) -> list[Path]:
    return [write_adapter(tmp_path_factory.mktemp("adapter"), base_folder, seed=seed) for seed in (1, 2)]


@pytest.fixture
def registry(tmp_path, database_url, base_folder) -> Registry:
    @asynccontextmanager
    async def run(**settings: Any) -> AsyncIterator[Client]:
        async with registry_here(tmp_path / "state", database_url, **settings) as client:
            await client.add_base(base_folder)
            yield client

    return run


async def pin(client: Client, name: str, **fields: int) -> a.PinAdapterResponse:
    return await client.adapters.PinAdapter(a.PinAdapterRequest(name=name, **fields), timeout=20)


async def pinned(client: Client) -> dict[str, int]:
    listed = await client.adapters.ListAdapters(a.ListAdaptersRequest(), timeout=20)
    return {adapter.name: adapter.pin_replicas for adapter in listed.adapters}


async def watched(client: Client, revision: int, store_id: str) -> list[a.WatchResponse]:
    """The events from a revision on, up to the next change; none of them a snapshot."""
    events = []
    call = client.adapters.Watch(a.WatchRequest(store_id=store_id, revision=revision), timeout=20)
    async for event in call:
        events.append(event)
        if event.HasField("change"):
            break
    call.cancel()
    return events


async def snapshot(client: Client) -> tuple[dict[str, int], a.Synced]:
    found: dict[str, int] = {}
    call = client.adapters.Watch(a.WatchRequest(), timeout=20)
    async for event in call:
        if event.HasField("synced"):
            call.cancel()
            return found, event.synced
        found |= {
            entry.adapter.name: entry.adapter.pin_replicas
            for entry in event.snapshot.entries
            if entry.HasField("adapter")
        }
    raise AssertionError("no snapshot came")


async def test_a_pin_is_stored_watched_and_stays_over_versions_and_restarts(registry, folders):
    async with registry() as client:
        await client.upload(folders[0], "sql")
        _, before = await snapshot(client)
        done = await pin(client, "sql")
        assert (done.adapter.pin_replicas, done.changed, done.revision) == (1, True, before.revision + 1)
        change = (await watched(client, before.revision, before.store_id))[-1].change
        assert [entry.adapter.pin_replicas for entry in change.entries] == [1]
        again = await pin(client, "sql", pin_replicas=1)
        assert (again.changed, again.revision) == (False, done.revision)
        assert (await client.upload(folders[1], "sql")).adapter.pin_replicas == 1
        assert (await pin(client, "sql", pin_replicas=PIN_ON_ALL)).changed
    async with registry() as client:
        assert await pinned(client) == {"sql": PIN_ON_ALL}
        assert (await snapshot(client))[0] == {"sql": PIN_ON_ALL}
        assert not (await pin(client, "sql", pin_replicas=0)).adapter.pin_replicas


async def test_a_pin_that_cannot_be_is_refused(registry, folders):
    async with registry() as client:
        await client.upload(folders[0], "sql")
        await refusal(pin(client, "other"), errors.AdapterNotFound)
        await refusal(pin(client, "No Name"), errors.InvalidName)
        error = await refusal(pin(client, "sql", pin_replicas=2**32 - 1), errors.InvalidParameter)
        assert error.field == "pin_replicas"
        assert await pinned(client) == {"sql": 0}


async def test_the_list_pins_at_start_and_at_registration_and_wins_over_unpinning(registry, folders):
    async with registry() as client:
        await client.upload(folders[0], "sql")
        await client.upload(folders[0], "mine")
        await pin(client, "mine", pin_replicas=3)
    async with registry(pinned_adapters="sql=2,mine,json=all") as client:
        assert await pinned(client) == {"sql": 2, "mine": 3}
        assert (await client.upload(folders[1], "json")).adapter.pin_replicas == PIN_ON_ALL
        assert (await client.upload(folders[1], "other")).adapter.pin_replicas == 0
        error = await refusal(pin(client, "sql", pin_replicas=0), errors.FailedPrecondition)
        assert error.metadata["setting"] == "pinned_adapters"
        await pin(client, "sql", pin_replicas=5)
    async with registry() as client:
        assert await pinned(client) == {"json": PIN_ON_ALL, "mine": 3, "other": 0, "sql": 5}
        await pin(client, "sql", pin_replicas=0)
    async with registry() as client:
        assert (await pinned(client))["sql"] == 0


async def test_what_is_above_a_limit_is_refused_at_registration_with_field_and_limit(
    registry, folders, tmp_path, base_folder
):
    large = write_adapter(tmp_path / "large", base_folder, seed=3, rank=9)
    narrow = write_adapter(tmp_path / "narrow", base_folder, seed=4, rank=8, targets=["q_proj", "v_proj"])
    async with registry() as client:
        await client.upload(large, "old")
    async with registry(max_rank=8, allowed_target_modules="q_proj,v_proj", max_adapters=2) as client:
        error = await refusal(client.upload(large, "large"), errors.UnsupportedAdapter)
        assert (error.field, error.metadata["limit"]) == ("r", "8")
        error = await refusal(client.upload(folders[0], "wide"), errors.UnsupportedAdapter)
        assert (error.field, error.metadata["limit"]) == ("target_modules", "q_proj,v_proj")
        assert (await client.upload(narrow, "narrow")).changed
        error = await refusal(client.upload(narrow, "third"), errors.ResourceExhausted)
        assert (error.field, error.metadata["limit"]) == ("name", "2")
        assert not (await client.upload(narrow, "narrow")).changed
        assert sorted(await pinned(client)) == ["narrow", "old"]  # what was there stays
