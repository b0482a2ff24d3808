"""ApiKeyService: a key is told once, kept as a hash, streamed to watchers, and revoked."""

from __future__ import annotations

import pytest
from pydantic import SecretStr

from common.api_keys import hash_of, id_of, make_key
from loraplex.errors import AlreadyExists, InvalidName, InvalidParameter, NotFound
from loraplex.registry.v1 import adapter_pb2 as a
from loraplex.registry.v1 import api_key_pb2 as k
from loraplex.registry.v1.api_key_pb2_grpc import ApiKeyServiceStub
from tests.running_registry import Client, refusal, registry_here


async def create(client: Client, name: str) -> k.CreateApiKeyResponse:
    return await ApiKeyServiceStub(client.channel).CreateApiKey(k.CreateApiKeyRequest(name=name), timeout=20)


async def listed(client: Client, **fields) -> k.ListApiKeysResponse:
    return await ApiKeyServiceStub(client.channel).ListApiKeys(k.ListApiKeysRequest(**fields), timeout=20)


async def delete(client: Client, key_id: str) -> k.DeleteApiKeyResponse:
    return await ApiKeyServiceStub(client.channel).DeleteApiKey(k.DeleteApiKeyRequest(key_id=key_id), timeout=20)


async def snapshot(client: Client) -> dict[str, k.ApiKeyHash]:
    """API keys by id, as a fresh watcher gets them."""
    keys = {}
    call = client.adapters.Watch(a.WatchRequest(), timeout=20)
    async for event in call:
        for entry in event.snapshot.entries:
            if entry.HasField("api_key"):
                keys[entry.api_key.key_id] = entry.api_key
        if event.HasField("synced"):
            call.cancel()
            return keys
    raise AssertionError("the watch ended")


async def test_a_key_is_told_once_and_listed_without_itself(tmp_path, database_url):
    async with registry_here(tmp_path, database_url) as client:
        made = await create(client, "acme")
        assert id_of(made.key) == made.api_key.key_id
        assert (made.api_key.tenant, made.api_key.name, made.revision) == ("default", "acme", 1)
        assert made.api_key.create_time.seconds > 1_700_000_000
        page = await listed(client)
        assert list(page.api_keys) == [made.api_key]
        assert made.key.split("_")[2] not in str(page)


async def test_no_file_of_the_registry_holds_a_key(tmp_path):
    async with registry_here(tmp_path) as client:
        secret = (await create(client, "acme")).key.split("_")[2].encode()
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert any(file.suffix == ".sqlite3" for file in files)
    assert not any(secret in file.read_bytes() for file in files)


async def test_keys_are_listed_page_by_page(tmp_path, database_url):
    async with registry_here(tmp_path, database_url) as client:
        ids = sorted([(await create(client, f"key-{number}")).api_key.key_id for number in range(5)])
        seen, token = [], ""
        while True:
            page = await listed(client, page_size=2, page_token=token)
            assert len(page.api_keys) <= 2
            seen += [key.key_id for key in page.api_keys]
            if not (token := page.next_page_token):
                break
        assert seen == ids
        await refusal(listed(client, page_token="nonsense"), InvalidParameter)
        await refusal(listed(client, page_size=1001), InvalidParameter)


async def test_names_are_checked_and_taken_once(tmp_path, database_url):
    async with registry_here(tmp_path, database_url) as client:
        first = await create(client, "acme")
        error = await refusal(create(client, "acme"), AlreadyExists)
        assert first.api_key.key_id in error.message
        for bad in ("", "Acme", "a b", "x" * 64, "bootstrap"):
            assert (await refusal(create(client, bad), InvalidName)).field == "name"
        await delete(client, first.api_key.key_id)
        assert (await create(client, "acme")).api_key.key_id != first.api_key.key_id


async def test_an_unknown_key_cannot_be_deleted(tmp_path, database_url):
    async with registry_here(tmp_path, database_url) as client:
        made = await create(client, "acme")
        error = await refusal(delete(client, made.key), NotFound)  # the whole key, by mistake
        assert made.key not in f"{error.message} {error.metadata}"
        await refusal(delete(client, ""), NotFound)
        assert len((await listed(client)).api_keys) == 1


async def test_watchers_get_hashes_and_hear_of_revocations(tmp_path, database_url):
    async with registry_here(tmp_path, database_url) as client:
        before = await create(client, "before")
        answers = client.adapters.Watch(a.WatchRequest(), timeout=60)
        events = (event async for event in answers if not event.HasField("heartbeat"))
        assert [entry.api_key.key_id for entry in (await anext(events)).snapshot.entries] == [before.api_key.key_id]
        assert (await anext(events)).HasField("synced")
        made = await create(client, "acme")
        change = (await anext(events)).change
        assert change.revision == made.revision
        assert change.entries[0].api_key == k.ApiKeyHash(
            key_id=made.api_key.key_id, tenant="default", key_sha256=hash_of(made.key)
        )
        gone = await delete(client, made.api_key.key_id)
        change = (await anext(events)).change
        assert (change.revision, change.entries[0].deleted_api_key_id) == (gone.revision, made.api_key.key_id)


async def test_the_bootstrap_key_is_there_from_the_start_and_changes_with_the_environment(tmp_path, database_url):
    first, second = make_key(), make_key()
    async with registry_here(tmp_path, database_url, bootstrap_key=SecretStr(first.text)) as client:
        [key] = (await listed(client)).api_keys
        assert (key.key_id, key.name) == (first.key_id, "bootstrap")
        assert (await snapshot(client))[first.key_id].key_sha256 == hash_of(first.text)
    async with registry_here(tmp_path, database_url, bootstrap_key=SecretStr(first.text)) as client:
        assert (await create(client, "acme")).revision == 2  # the start changed nothing
    async with registry_here(tmp_path, database_url, bootstrap_key=SecretStr(second.text)) as client:
        assert {key.name: key.key_id for key in (await listed(client)).api_keys}["bootstrap"] == second.key_id
        assert first.key_id not in await snapshot(client)
    async with registry_here(tmp_path, database_url) as client:
        assert second.key_id in await snapshot(client)  # without the variable it stays until it is deleted
        await delete(client, second.key_id)
        assert second.key_id not in await snapshot(client)


async def test_a_bootstrap_key_cannot_take_the_id_of_another(tmp_path, database_url):
    async with registry_here(tmp_path, database_url) as client:
        made = await create(client, "acme")
    other = f"lpx_{made.api_key.key_id}_{'b' * 64}"
    with pytest.raises(AlreadyExists, match="acme") as caught:
        async with registry_here(tmp_path, database_url, bootstrap_key=SecretStr(other)):
            pass
    assert "b" * 64 not in caught.value.message
