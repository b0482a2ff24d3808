"""Two registries on one PostgreSQL database: who watches one hears of what is written at the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

import grpc
import pytest
import sqlalchemy as sa

from loraplex import errors
from loraplex.registry.v1 import adapter_pb2 as a
from tests.postgres_server import PostgresServer
from tests.running_registry import Client, eventually, registry_here, registry_process
from tests.tiny_adapters import write_adapter
from tests.tiny_base import write_tiny_base
from tests.watched_catalog import Catalog

HEARD_S: Final = 1.0
LOOK: Final = "registry.head_follower._LOOK_EVERY_S"


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapter_folders(tmp_path_factory: pytest.TempPathFactory, base_folder: Path) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [write_adapter(root / str(i), base_folder, seed=i, targets=("q_proj",), rank=1) for i in range(2)]


@asynccontextmanager
async def replica_processes(root: Path, url: str) -> AsyncIterator[list[Client]]:
    """Two registries that start together on an empty database; each has its own state folder."""
    one = registry_process(root / "one", "--database-url", url)
    two = registry_process(root / "two", "--database-url", url)
    async with one as first, two as second:
        ports = await asyncio.gather(first.listening_port(), second.listening_port())
        clients = [Client(f"127.0.0.1:{port}") for port in ports]
        yield clients
        await asyncio.gather(*(client.channel.close() for client in clients))


@asynccontextmanager
async def replicas_here(root: Path, url: str) -> AsyncIterator[list[Client]]:
    """Two registries in this process. Their watches look for themselves only at heartbeats, which do not come here."""
    first = registry_here(root / "one", url, heartbeat_s=600)
    second = registry_here(root / "two", url, heartbeat_s=600)
    async with first as one, second as two:
        yield [one, two]


class Watcher:
    """A watcher of one registry that is open and synced."""

    def __init__(self, client: Client) -> None:
        self.catalog = Catalog()
        self._call = self.catalog.watch(client)
        self._events = aiter(self._call)

    async def until(self, revision: int) -> None:
        """Read until the catalog is at a revision; every event is checked for gaps."""
        async with asyncio.timeout(60):
            while not self.catalog.store_id or self.catalog.revision < revision:
                self.catalog.apply(await anext(self._events))

    def close(self) -> None:
        self._call.cancel()


@contextmanager
def watching(client: Client) -> Iterator[Watcher]:
    watcher = Watcher(client)
    try:
        yield watcher
    finally:
        watcher.close()


async def test_a_write_at_one_process_is_seen_at_the_other_within_a_second(
    tmp_path, postgres_url, base_folder, adapter_folders
):
    async with replica_processes(tmp_path, postgres_url) as (one, two):
        await one.add_base(base_folder)
        with watching(two) as watcher:
            await watcher.until(1)
            heard_s: list[float] = []
            for name in ("a", "b", "c"):
                answer = await one.upload(adapter_folders[0], name)
                committed_s = time.monotonic()
                await watcher.until(answer.revision)
                heard_s.append(time.monotonic() - committed_s)
                assert watcher.catalog.adapters[name] == answer.adapter
            assert min(heard_s) < HEARD_S  # the others may have met a machine that stood still


async def test_writers_at_two_processes_leave_no_gap_for_any_watcher(
    tmp_path, postgres_url, base_folder, adapter_folders
):
    async with replica_processes(tmp_path, postgres_url) as clients:
        await clients[0].add_base(base_folder)

        async def writer(client: Client, name: str) -> list[int]:
            revisions = []
            for folder in adapter_folders:
                revisions.append((await client.upload(folder, name)).revision)
            revisions.append((await client.adapters.DeleteAdapter(a.DeleteAdapterRequest(name=name))).revision)
            revisions.append((await client.upload(adapter_folders[0], name)).revision)
            return revisions

        with watching(clients[0]) as first, watching(clients[1]) as second:
            async with asyncio.TaskGroup() as tasks:
                watched = [tasks.create_task(watcher.until(33)) for watcher in (first, second)]
                written = [tasks.create_task(writer(clients[i % 2], f"n{i}")) for i in range(8)]
            assert all(task.done() for task in watched)
            truth = Catalog()
            await truth.sync(clients[1])
            assert first.catalog.adapters == second.catalog.adapters == truth.adapters
    revisions = [task.result() for task in written]
    assert all(mine == sorted(mine) for mine in revisions)  # in the order in which they were committed
    assert sorted(revision for mine in revisions for revision in mine) == list(range(2, 34))
    assert truth.revision == 33


async def test_a_notification_suffices(tmp_path, postgres_url, postgres_server, base_folder, monkeypatch):
    monkeypatch.setattr(LOOK, 600.0)
    async with replicas_here(tmp_path, postgres_url) as (one, two):
        with watching(two) as watcher:
            await watcher.until(0)
            await until_listening(postgres_server, postgres_url, 2)
            await one.add_base(base_folder)
            await watcher.until(1)


async def test_a_lost_notification_costs_no_more_than_a_second_or_so(tmp_path, postgres_url, base_folder, monkeypatch):
    monkeypatch.setattr("registry.store.NOTIFY_CHANNEL", "nobody_listens_here")
    async with replicas_here(tmp_path, postgres_url) as (one, two):
        with watching(two) as watcher:
            await watcher.until(0)
            await one.add_base(base_folder)
            await watcher.until(1)


async def test_replicas_go_on_when_the_database_has_cut_all_connections(
    tmp_path, postgres_url, postgres_server, base_folder, adapter_folders
):
    async with replicas_here(tmp_path, postgres_url) as (one, two):
        await one.add_base(base_folder)
        catalog = Catalog()
        following = asyncio.create_task(follow(two, catalog, 2))
        await until_listening(postgres_server, postgres_url, 2)
        connections = f"FROM pg_stat_activity WHERE datname = '{database_of(postgres_url)}'"
        assert len(postgres_server.execute(f"SELECT pg_terminate_backend(pid, 10000) {connections}")) >= 4
        await one.upload(adapter_folders[0], "after")
        await following
        assert set(catalog.adapters) == {"after"}
        await until_listening(postgres_server, postgres_url, 2)


async def follow(client: Client, catalog: Catalog, revision: int) -> None:
    """Watch as a router does: a watch that the database's absence ends is begun again."""
    async with asyncio.timeout(60):
        while catalog.revision < revision:
            try:
                await catalog.follow(client, lambda catalog: catalog.revision >= revision)
            except grpc.RpcError as error:
                if not isinstance(errors.from_rpc_error(error), errors.RegistryUnavailable):
                    raise


async def until_listening(server: PostgresServer, url: str, wanted: int) -> None:
    """Wait until so many connections to the database listen; the server can only be asked."""
    done = "state = 'idle' AND starts_with(query, 'LISTEN')"
    query = f"SELECT pid FROM pg_stat_activity WHERE datname = '{database_of(url)}' AND {done}"
    await eventually(lambda: len(server.execute(query)) == wanted)


def database_of(url: str) -> str:
    return str(sa.make_url(url).database)
