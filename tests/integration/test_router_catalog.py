"""The router and its registry: late, restarted, silent, gone; and the catalog's copy on disk."""

from __future__ import annotations

import asyncio
import json
import random
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from structlog.testing import capture_logs

from router import catalog_watch
from router.catalog import Catalog
from router.catalog_watch import CatalogWatch
from tests.integration.router_fakes import (
    BASE_ID,
    FakeRegistry,
    FakeWorker,
    adapter_entry,
    base_entry,
    deleted_entry,
    digest,
    eventually,
    running_router,
)


@pytest.fixture
async def registry() -> AsyncIterator[FakeRegistry]:
    fake = await FakeRegistry(base_entry(), adapter_entry("sql")).start()
    yield fake
    if fake._server is not None:
        await fake.stop()


@pytest.fixture
async def worker() -> AsyncIterator[FakeWorker]:
    fake = await FakeWorker().start()
    yield fake
    await fake.stop()


@pytest.fixture
async def following() -> AsyncIterator[tuple[Catalog, list[asyncio.Task[None]]]]:
    """A catalog and a list for the tasks that feed it."""
    tasks: list[asyncio.Task[None]] = []
    yield Catalog("test"), tasks
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


Following = tuple[Catalog, list[asyncio.Task[None]]]


def follow(following: Following, address: str, silence_s: float = 15.0) -> Catalog:
    catalog, tasks = following
    tasks.append(asyncio.create_task(CatalogWatch(catalog, address, rng=random.Random(1), silence_s=silence_s).run()))
    return catalog


def names(catalog: Catalog) -> list[str]:
    return sorted(name for _, name in catalog.snapshot.adapters)


async def test_snapshot_then_changes(registry: FakeRegistry, following: Following) -> None:
    catalog = follow(following, registry.address)
    await catalog.wait_for_revision(1, 30)
    assert (list(catalog.snapshot.bases), names(catalog)) == ([BASE_ID], ["sql"])
    await registry.commit(adapter_entry("a"), adapter_entry("b"))
    await registry.commit(deleted_entry("sql"))
    await catalog.wait_for_revision(3, 30)
    assert names(catalog) == ["a", "b"]


async def test_a_transaction_is_seen_whole_or_not_at_all(registry: FakeRegistry, following: Following) -> None:
    catalog = follow(following, registry.address)
    await catalog.wait_for_revision(1, 30)
    seen: list[tuple[int, int]] = []

    async def watch_swaps() -> None:
        while catalog.snapshot.revision < 20:
            await catalog.changed.wait()
            seen.append((catalog.snapshot.revision, len(names(catalog))))

    watching = asyncio.create_task(watch_swaps())
    for i in range(19):
        await registry.commit(adapter_entry(f"left{i}"), adapter_entry(f"right{i}"))
    await asyncio.wait_for(watching, 30)
    assert seen
    assert all(count == 1 + 2 * (revision - 1) for revision, count in seen)


async def test_a_restarted_registry_is_resumed_by_revision(registry: FakeRegistry, following: Following) -> None:
    catalog = follow(following, registry.address)
    await catalog.wait_for_revision(1, 30)
    await registry.stop()
    registry.log.append([adapter_entry("meanwhile")])
    await registry.start()
    await catalog.wait_for_revision(2, 30)
    assert names(catalog) == ["meanwhile", "sql"]
    assert [(request.store_id, request.revision) for request in registry.requests] == [("", 0), ("store-1", 1)]


async def test_another_store_replaces_the_catalog(registry: FakeRegistry, following: Following) -> None:
    catalog = follow(following, registry.address)
    await catalog.wait_for_revision(1, 30)
    await registry.stop()
    registry.store_id, registry.log = "store-2", [[base_entry(), adapter_entry("other")]]
    await registry.start()
    await eventually(lambda: names(catalog) == ["other"])
    assert catalog.snapshot.store_id == "store-2"


async def test_a_gap_in_the_revisions_asks_for_a_snapshot(registry: FakeRegistry, following: Following) -> None:
    catalog = follow(following, registry.address)
    await catalog.wait_for_revision(1, 30)
    registry.skips_a_revision = True
    await registry.commit(adapter_entry("lost"))
    await registry.commit(adapter_entry("next"))
    await eventually(lambda: names(catalog) == ["lost", "next", "sql"])
    assert [request.store_id for request in registry.requests] == ["", ""]


async def test_silence_reconnects(registry: FakeRegistry, following: Following) -> None:
    registry.send_heartbeats = False
    catalog = follow(following, registry.address, silence_s=0.2)
    await catalog.wait_for_revision(1, 30)
    await eventually(lambda: [request.revision for request in registry.requests].count(1) >= 2)
    assert names(catalog) == ["sql"]


async def test_heartbeats_keep_a_quiet_stream_alive(registry: FakeRegistry, following: Following) -> None:
    registry.heartbeat_s = 0.05
    catalog = follow(following, registry.address, silence_s=4.0)
    await catalog.wait_for_revision(1, 30)
    await asyncio.sleep(4.5)
    assert len(registry.requests) == 1


async def test_a_router_without_registry_waits_says_so_and_is_not_ready(
    registry: FakeRegistry, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_watch, "_REMIND_S", 1000.0)  # however long it takes here
    await registry.stop()
    with capture_logs() as logs:
        async with (
            running_router(registry.address, worker.address, ready=False) as router,
            httpx2.AsyncClient(base_url=router.url, timeout=30) as raw,
        ):
            await eventually(lambda: any(line["event"] == "catalog.waiting_for_registry" for line in logs))
            ready = await raw.get("/readyz")
            assert ready.status_code == 503
            assert registry.address in ready.text
            assert (await raw.get("/livez")).status_code == 200
            answer = await raw.post("/v1/completions", json={"model": "sql", "prompt": "x"})
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "registry_unavailable"
            assert (await raw.get("/v1/models")).status_code == 503
            await registry.start()
            await asyncio.wait_for(router.router.catalog.ready.wait(), 30)
            assert (await raw.get("/readyz")).status_code == 200
    said = [line for line in logs if line["event"] == "catalog.waiting_for_registry"]
    assert len(said) == 1  # not once per attempt
    assert said[0]["registry"] == registry.address


async def test_serving_goes_on_without_the_registry(registry: FakeRegistry, worker: FakeWorker) -> None:
    with capture_logs() as logs:
        async with running_router(registry.address, worker.address) as router:
            await registry.stop()
            await eventually(lambda: any(line["event"] == "catalog.registry_lost" for line in logs))
            assert await router.generate("sql")
            async with httpx2.AsyncClient(base_url=router.url, timeout=30) as raw:
                assert (await raw.get("/readyz")).status_code == 200
            await registry.start()


async def test_a_catalog_cache_starts_a_router_without_registry(
    registry: FakeRegistry, worker: FakeWorker, tmp_path: Path
) -> None:
    cache = tmp_path / "catalog"
    async with running_router(registry.address, worker.address, catalog_cache=cache) as router:
        await router.router.catalog.wait_for_revision(await registry.commit(adapter_entry("json", "new", "old")))
        await eventually(cache.exists)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o600
    assert list(tmp_path.rglob("*")) == [cache], "a scratch file was left"  # noqa: ASYNC240
    await registry.stop()
    async with running_router(registry.address, worker.address, catalog_cache=cache) as router:
        await router.generate("json@" + digest("version old")[:12])
        assert worker.requests[-1].adapter.artifact_digest == digest("artifact old")
        await registry.start()
        await eventually(lambda: len(registry.requests) == 2)
    assert (registry.requests[-1].store_id, registry.requests[-1].revision) == ("store-1", 2)


@pytest.mark.parametrize("damage", ["flip", "cut", "text", "writable", "folder"])
async def test_a_damaged_cache_is_ignored_with_a_warning(
    registry: FakeRegistry, worker: FakeWorker, tmp_path: Path, damage: str
) -> None:
    cache = tmp_path / "catalog"
    async with running_router(registry.address, worker.address, catalog_cache=cache):
        pass
    content = cache.read_bytes()
    match damage:
        case "flip":
            cache.write_bytes(content.replace(b'"sql"', b'"sqx"'))
        case "cut":
            cache.write_bytes(content[:-10])
        case "text":
            cache.write_text(json.dumps({"store_id": "x"}))
        case "writable":
            cache.chmod(0o666)
        case "folder":
            cache.unlink()
            cache.mkdir()
    await registry.stop()
    with capture_logs() as logs:
        async with running_router(registry.address, worker.address, catalog_cache=cache, ready=False) as router:
            assert router.router.catalog.why_not_ready() is not None
            assert [line["log_level"] for line in logs if line["event"] == "catalog.cache_ignored"] == ["warning"]


async def test_a_cache_that_cannot_be_written_stops_nobody(
    registry: FakeRegistry, worker: FakeWorker, tmp_path: Path
) -> None:
    with capture_logs() as logs:
        async with running_router(registry.address, worker.address, catalog_cache=tmp_path / "no" / "such") as router:
            assert await router.generate("sql")
            await eventually(lambda: any(line["event"] == "catalog.cache_not_written" for line in logs))
