"""API keys at both fronts of a router, and the cluster token at its operators' calls."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from grpc import aio

from common.api_keys import NewKey, hash_of
from loraplex import credentials, errors
from loraplex.client import AsyncClient, Credentials
from loraplex.registry.v1 import adapter_pb2, api_key_pb2
from loraplex.router.v1 import fleet_pb2, fleet_pb2_grpc, models_pb2
from tests.integration.router_fakes import (
    FakeRegistry,
    FakeWorker,
    RunningRouter,
    adapter_entry,
    base_entry,
    eventually,
    running_router,
)

TOKEN = "the-cluster-token-of-this-test"
KEY, OTHER = (NewKey(n * 12, f"lpx_{n * 12}_{(n + 'f') * 32}") for n in "12")  # fixed: they name test cases
BODY = {"model": "sql", "prompt": "x", "messages": [{"role": "user", "content": "x"}]}


def key_entry(key: NewKey) -> adapter_pb2.CatalogEntry:
    hashed = api_key_pb2.ApiKeyHash(key_id=key.key_id, tenant="default", key_sha256=hash_of(key.text))
    return adapter_pb2.CatalogEntry(api_key=hashed)


def deleted(key: NewKey) -> adapter_pb2.CatalogEntry:
    return adapter_pb2.CatalogEntry(deleted_api_key_id=key.key_id)


@pytest.fixture
async def registry() -> AsyncIterator[FakeRegistry]:
    fake = await FakeRegistry(base_entry(), adapter_entry("sql")).start()
    yield fake
    await fake.stop()


@pytest.fixture
async def worker() -> AsyncIterator[FakeWorker]:
    fake = await FakeWorker().start()
    yield fake
    await fake.stop()


async def refused(call: Any) -> errors.LoraplexError:
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    return errors.from_rpc_error(caught.value)


async def grpc_refusals(router: RunningRouter, metadata: Any) -> list[errors.LoraplexError]:
    return [
        await refused(router.generate("sql", metadata=metadata)),
        await refused(router.models.ListModels(models_pb2.ListModelsRequest(), metadata=metadata, timeout=30)),
        await refused(router.models.GetModel(models_pb2.GetModelRequest(name="sql"), metadata=metadata, timeout=30)),
    ]


async def http_answers(router: RunningRouter, headers: dict[str, str]) -> list[httpx2.Response]:
    async with httpx2.AsyncClient(base_url=router.url, timeout=30, headers=headers) as client:
        return [
            await client.post("/v1/chat/completions", json={key: BODY[key] for key in ("model", "messages")}),
            await client.post("/v1/completions", json={key: BODY[key] for key in ("model", "prompt")}),
            await client.post("/v1/completions", json={"model": "sql", "prompt": "x", "stream": True}),
            await client.get("/v1/models"),
            await client.get("/v1/models/sql"),
        ]


async def assert_refused(router: RunningRouter, worker: FakeWorker, sent: str | None, said: str) -> None:
    """Every way in says the same, in the shape of its front, and repeats no secret; the worker hears nothing."""
    before = len(worker.requests)
    for error in await grpc_refusals(router, () if sent is None else (("authorization", sent),)):
        assert type(error) is errors.Unauthenticated
        assert said in error.message
        assert error.metadata == {"credential": "api_key"}
    for answer in await http_answers(router, {} if sent is None else {"authorization": sent}):
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "unauthenticated")
        assert said in error["message"]
        for secret in (KEY, OTHER):
            assert secret.text.split("_")[2] not in answer.text
    assert len(worker.requests) == before


async def assert_served(router: RunningRouter, sent: str | None) -> None:
    metadata = () if sent is None else (("authorization", sent),)
    assert await router.generate("sql", metadata=metadata)
    assert (await router.models.ListModels(models_pb2.ListModelsRequest(), metadata=metadata, timeout=30)).models
    answers = await http_answers(router, {} if sent is None else {"authorization": sent})
    assert [answer.status_code for answer in answers] == [200] * 5


async def test_a_router_on_loopback_asks_for_a_key_as_soon_as_one_exists(registry, worker):
    async with running_router(registry.address, worker.address) as router:
        await assert_served(router, None)
        await assert_served(router, "Bearer not needed")  # what stock clients send where no key is needed
        await registry.commit(key_entry(KEY))
        await eventually(lambda: bool(router.router.catalog.snapshot.api_keys))
        await assert_refused(router, worker, None, "an API key is needed")
        await assert_served(router, f"Bearer {KEY.text}")


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (None, "an API key is needed"),
        ("Bearer not needed", "is not `Bearer lpx_"),
        (KEY.text, "is not `Bearer lpx_"),
        (f"Basic {KEY.text}", "is not `Bearer lpx_"),
        (f"Bearer {OTHER.text}", "is not valid"),
        (f"Bearer lpx_{KEY.key_id}_{'a' * 64}", "is not valid"),
    ],
)
async def test_a_missing_malformed_or_wrong_key_is_refused_at_both_fronts(registry, worker, sent, said):
    await registry.commit(key_entry(KEY))
    async with running_router(registry.address, worker.address) as router:
        await assert_refused(router, worker, sent, said)


async def test_a_revoked_key_is_refused_at_once(registry, worker):
    await registry.commit(key_entry(KEY), key_entry(OTHER))
    async with running_router(registry.address, worker.address) as router:
        await assert_served(router, f"Bearer {KEY.text}")
        await registry.commit(deleted(KEY))
        await eventually(lambda: KEY.key_id not in router.router.catalog.snapshot.api_keys)
        await assert_refused(router, worker, f"Bearer {KEY.text}", "revoked")
        await assert_served(router, f"Bearer {OTHER.text}")


async def test_bound_elsewhere_a_router_lets_nobody_in_until_a_key_exists(registry, worker):
    async with running_router(registry.address, worker.address, host="0.0.0.0", cluster_token=TOKEN) as router:
        await assert_refused(router, worker, None, "no API key exists yet")
        await assert_refused(router, worker, f"Bearer {KEY.text}", "loraplex key add NAME")
        await registry.commit(key_entry(KEY))
        await eventually(lambda: bool(router.router.catalog.snapshot.api_keys))
        await assert_served(router, f"Bearer {KEY.text}")
        await registry.commit(deleted(KEY))
        await eventually(lambda: not router.router.catalog.snapshot.api_keys)
        await assert_refused(router, worker, None, "no API key exists yet")


async def test_insecure_lets_everybody_in_until_a_key_exists(registry, worker):
    async with running_router(registry.address, worker.address, host="0.0.0.0", insecure=True) as router:
        await assert_served(router, None)
        await registry.commit(key_entry(KEY))
        await eventually(lambda: bool(router.router.catalog.snapshot.api_keys))
        await assert_refused(router, worker, None, "an API key is needed")


async def test_a_large_body_without_a_key_gets_its_answer(registry, worker):
    await registry.commit(key_entry(KEY))
    async with (
        running_router(registry.address, worker.address) as router,
        httpx2.AsyncClient(base_url=router.url, timeout=30) as client,
    ):
        answer = await client.post("/v1/completions", json={"model": "sql", "prompt": "x" * 6_000_000})
        assert answer.status_code == 401
        answer = await client.post("/v1/completions", content=b"not JSON")
        assert answer.status_code == 401  # a stranger learns nothing more


async def test_probes_health_and_metrics_stay_open(registry, worker):
    await registry.commit(key_entry(KEY))
    async with (
        running_router(registry.address, worker.address, cluster_token=TOKEN) as router,
        httpx2.AsyncClient(base_url=router.url, timeout=30) as client,
    ):
        assert [(await client.get(path)).status_code for path in ("/livez", "/readyz", "/metrics")] == [200] * 3


async def test_the_stock_openai_client_sends_its_api_key(registry, worker):
    await registry.commit(key_entry(KEY))
    async with running_router(registry.address, worker.address) as router:
        async with openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key=KEY.text, max_retries=0) as client:
            done = await client.completions.create(model="sql", prompt="x")
            assert done.choices[0].text == "Hello adapter!"
        async with openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="not needed", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError, match="loraplex key add NAME"):
                await client.completions.create(model="sql", prompt="x")


async def test_the_fleet_is_for_operators(registry, worker):
    await registry.commit(key_entry(KEY))
    async with running_router(registry.address, worker.address, cluster_token=TOKEN) as router:
        fleet = fleet_pb2_grpc.FleetServiceStub(router.channel)

        def ask(secret: str | None) -> Any:
            return fleet.ListWorkers(fleet_pb2.ListWorkersRequest(), metadata=credentials.bearer(secret), timeout=30)

        assert len((await ask(TOKEN)).workers) == 1
        assert type(await refused(ask(None))) is errors.Unauthenticated
        assert type(await refused(ask(TOKEN + "x"))) is errors.Unauthenticated
        assert type(await refused(ask(KEY.text))) is errors.PermissionDenied


async def test_the_client_library_carries_both_credentials(registry, worker):
    await registry.commit(key_entry(KEY))
    async with running_router(registry.address, worker.address, cluster_token=TOKEN) as router:
        async with AsyncClient(router.address, credentials=Credentials(KEY.text, TOKEN)) as client:
            assert [event async for event in client.generate("sql", "x")]
            assert [worker.state async for worker in client.list_workers()] == ["serving"]
        async with AsyncClient(router.address, credentials=Credentials(None, TOKEN)) as client:
            assert [model.name async for model in client.list_models()] == ["tiny/base", "sql"]
            with pytest.raises(errors.Unauthenticated):
                assert [event async for event in client.generate("sql", "x")]
        async with AsyncClient(router.address, credentials=Credentials()) as client:
            with pytest.raises(errors.Unauthenticated, match="cluster token"):
                assert [worker async for worker in client.list_workers()]


async def test_keys_survive_in_the_cache_file_as_hashes_only(registry, worker, tmp_path: Path):
    await registry.commit(key_entry(KEY))
    cache = tmp_path / "catalog"
    async with running_router(registry.address, worker.address, catalog_cache=cache):
        pass
    content = cache.read_bytes()
    assert cache.stat().st_mode & 0o777 == 0o600
    assert KEY.text.encode() not in content
    assert KEY.text.split("_")[2].encode() not in content
    assert json.loads(content.partition(b"\n")[2])["api_keys"] == [
        {"key_id": KEY.key_id, "tenant": "default", "key_sha256": hash_of(KEY.text)}
    ]
    async with running_router("127.0.0.1:1", worker.address, catalog_cache=cache) as router:
        await assert_refused(router, worker, None, "an API key is needed")
        await assert_served(router, f"Bearer {KEY.text}")
