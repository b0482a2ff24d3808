"""The store: one transaction, one revision, one log entry; and tables as the migrations make them."""

from __future__ import annotations

import asyncio

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from loraplex.errors import FailedPrecondition, Unavailable
from loraplex.registry.v1 import adapter_pb2 as a
from registry.artifacts import ArtifactFolder
from registry.database import alembic_config, migrate, open_engine, parse_url
from registry.domain import (
    AdapterRecord,
    ApiKeyRecord,
    BaseModelRecord,
    Change,
    DeletedAdapter,
    DeletedApiKey,
    VersionRecord,
    cut_over,
)
from registry.head_signal import HeadSignal
from registry.service.garbage import collect
from registry.service.watches import Watches
from registry.store import Store
from registry.tables import METADATA

BASE = BaseModelRecord("tiny", "d", "LlamaForCausalLM", 5, 1)


def adapter(name: str, digest: str = "v1", existing: AdapterRecord | None = None) -> AdapterRecord:
    version = VersionRecord(digest, f"a-{digest}", "d", "none", 4, 100, ("k_proj", "q_proj"), 2, 14, "F32", 1)
    return cut_over(existing, name, "tiny", version)


@pytest.fixture
async def engine(tmp_path, database_url):
    engine = open_engine(parse_url(database_url or f"sqlite:///{tmp_path}/x.sqlite3"))
    await migrate(engine)
    yield engine
    await engine.dispose()


@pytest.fixture
def signal():
    return HeadSignal()


@pytest.fixture
async def store(engine, signal):
    store = Store(engine, keep_changes=3, on_commit=signal.advance)
    async with store.write() as transaction:
        await transaction.put_base(BASE, "{}")
    return store


async def put(store: Store, record: AdapterRecord) -> int:
    async with store.write() as transaction:
        await transaction.put_adapter(record)
    return transaction.revision


async def test_the_migrations_make_the_tables_that_the_code_uses(engine):
    async with engine.connect() as connection:
        differences = await connection.run_sync(
            lambda sync: compare_metadata(
                MigrationContext.configure(sync, opts={"include_object": _not_alembic}), METADATA
            )
        )
    assert differences == []


def _not_alembic(item, name, kind, reflected, compare_to):
    return name != "alembic_version"


async def test_migrating_again_changes_nothing(engine, store):
    async with store.read() as reader:
        before = await reader.head()
    await migrate(engine)
    async with store.read() as reader:
        assert await reader.head() == before


async def test_each_transaction_takes_the_next_revision_and_logs_its_entries(store, signal):
    one = adapter("one")
    assert await put(store, one) == 2
    async with store.write() as transaction:
        await transaction.delete_adapter("default", "one")
        await transaction.put_adapter(adapter("two"))
    assert (transaction.revision, signal.revision) == (3, 3)
    async with store.read() as reader:
        assert await reader.changes(1, 10) == [
            Change(2, (one,)),
            Change(3, (DeletedAdapter("default", "one"), adapter("two"))),
        ]
        assert [record.name for record in await reader.adapters("default")] == ["two"]


async def test_a_transaction_without_changes_takes_no_revision(store, signal):
    async with store.write() as transaction:
        assert await transaction.adapter("default", "one") is None
    assert transaction.revision == 1
    assert await put(store, adapter("one")) == 2
    assert signal.revision == 2


async def test_a_failed_transaction_leaves_nothing(store, signal):
    async def fail() -> None:
        async with store.write() as transaction:
            await transaction.put_adapter(adapter("one"))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await fail()
    assert signal.revision == 1
    async with store.read() as reader:
        assert (await reader.head()).revision == 1
        assert await reader.adapters("default") == []
    assert await put(store, adapter("one")) == 2


async def test_versions_are_kept_newest_first(store):
    record = adapter("x", "v1")
    for digest in ("v2", "v3", "v2"):
        await put(store, record)
        record = adapter("x", digest, record)
    await put(store, record)
    async with store.read() as reader:
        found = await reader.adapter("default", "x")
    assert found == record
    assert (found.current, [v.version_digest for v in found.versions]) == ("v2", ["v3", "v2", "v1"])


async def test_concurrent_writers_take_revisions_in_a_row(store):
    revisions = await asyncio.gather(*(put(store, adapter(f"n{i}")) for i in range(20)))
    assert sorted(revisions) == list(range(2, 22))
    async with store.read() as reader:
        assert [change.revision for change in await reader.changes(0, 100)] == [19, 20, 21]


async def test_a_reader_sees_one_moment(store):
    async with store.read() as reader:
        assert (await reader.head()).revision == 1
        await put(store, adapter("one"))
        snapshot = await reader.snapshot()
    assert (snapshot.head.revision, snapshot.entries) == (1, (BASE,))


async def test_pages_go_by_name_in_byte_order(store):
    for name in ("b", "a_b", "a", "a.b", "a-b"):
        await put(store, adapter(name))
    async with store.read() as reader:
        assert [record.name for record in await reader.adapters("default", "a", 3)] == ["a-b", "a.b", "a_b"]


class Folder(ArtifactFolder):
    """Notes what is removed; has no files."""

    def __init__(self) -> None:
        self.removed: list[str] = []

    def remove(self, digest: str) -> None:
        self.removed.append(digest)


async def test_only_what_no_version_names_is_collected(store):
    await put(store, adapter("x", "v1"))
    folder = Folder()
    assert await collect(store, folder, {"a-v1", "a-v2"}) == 1
    assert folder.removed == ["a-v2"]
    async with store.read() as reader:
        assert (await reader.head()).revision == 2


async def test_a_watcher_that_falls_out_of_the_log_is_sent_away(store, signal):
    events = Watches(store, signal, heartbeat_s=60).watch(a.WatchRequest())
    kinds = [(await anext(events)).WhichOneof("event") for _ in range(2)]
    assert kinds == ["snapshot", "synced"]
    for i in range(5):  # the log keeps 3
        await put(store, adapter(f"n{i}"))
    with pytest.raises(Unavailable, match="fell behind"):
        await anext(events)


async def test_a_database_that_fails_is_a_typed_error(tmp_path):
    engine = open_engine(parse_url(f"sqlite:///{tmp_path}/x.sqlite3"))  # not migrated: it has no tables
    store = Store(engine, keep_changes=3, on_commit=lambda _: None)
    with pytest.raises(Unavailable):
        async with store.read() as reader:
            await reader.head()
    await engine.dispose()


def test_a_database_in_no_folder_is_told_before_it_is_opened(tmp_path):
    with pytest.raises(FailedPrecondition, match="does not exist"):
        open_engine(parse_url(f"sqlite:///{tmp_path}/no/such/folder/x.sqlite3"))


async def test_sqlite_runs_with_the_settings_that_keep_data_safe(tmp_path):
    engine = open_engine(parse_url(f"sqlite:///{tmp_path}/x.sqlite3"))
    async with engine.connect() as connection:
        values = [
            (await connection.execute(sa.text(f"PRAGMA {name}"))).scalar_one()
            for name in ("journal_mode", "synchronous", "foreign_keys")
        ]
    await engine.dispose()
    assert values == ["wal", 2, 1]


async def test_api_keys_are_entries_of_the_catalog_and_gone_when_deleted(store):
    one, two = (ApiKeyRecord(f"id-{name}", "default", name, "0" * 64, 1) for name in ("one", "two"))
    async with store.write() as transaction:
        await transaction.put_api_key(two)
        await transaction.put_api_key(one)
    async with store.read() as reader:
        assert await reader.api_keys("default") == [one, two]
        assert await reader.api_keys("default", "id-one", 5) == [two]
        assert await reader.api_keys("acme") == []
        assert await reader.api_key("id-one") == await reader.api_key_named("default", "one") == one
        assert {one, two} <= set((await reader.snapshot()).entries)
    async with store.write() as transaction:
        await transaction.delete_api_key("id-one")
    async with store.read() as reader:
        assert await reader.changes(1, 10) == [Change(2, (two, one)), Change(3, (DeletedApiKey("id-one"),))]
        assert await reader.api_key("id-one") is None
        assert one not in (await reader.snapshot()).entries


async def test_replicas_that_start_together_migrate_once(tmp_path, database_url):
    url = parse_url(database_url or f"sqlite:///{tmp_path}/x.sqlite3")
    engines = [open_engine(url) for _ in range(4)]
    async with asyncio.TaskGroup() as tasks:
        for engine in engines:
            tasks.create_task(migrate(engine))
    stores = [Store(engine, keep_changes=3, on_commit=lambda _: None) for engine in engines]
    heads = set()
    for store in stores:
        async with store.read() as reader:
            heads.add(await reader.head())
    for engine in engines:
        await engine.dispose()
    assert len(heads) == 1


FIRST_ROWS = (
    "INSERT INTO base_models VALUES ('tiny', 'd', 'LlamaForCausalLM', 5, '{}', 1)",
    "INSERT INTO adapters VALUES ('default', 'old', 'tiny', 'v1', 1, 1)",
    "INSERT INTO versions VALUES (7, 'default', 'old', 'v1', 'a-v1', 'd', 'none', 4, 100, 'k_proj', 2, 14, 'F32', 1)",
    "UPDATE head SET revision = 2",
)


async def test_a_database_of_the_first_version_is_brought_up_to_date_with_what_it_holds(tmp_path, database_url):
    engine = open_engine(parse_url(database_url or f"sqlite:///{tmp_path}/x.sqlite3"))
    async with engine.execution_options(immediate=True).begin() as connection:
        await connection.run_sync(lambda sync: command.upgrade(alembic_config(sync), "0001"))
        for row in FIRST_ROWS:
            await connection.exec_driver_sql(row)
        tables = await connection.run_sync(lambda sync: sa.inspect(sync).get_table_names())
    assert "api_keys" not in tables
    await migrate(engine)
    store = Store(engine, keep_changes=3, on_commit=lambda _: None)
    key = ApiKeyRecord("id", "default", "acme", "0" * 64, 1)
    async with store.write() as transaction:
        await transaction.put_api_key(key)
    assert transaction.revision == 3
    async with store.read() as reader:
        old = await reader.adapter("default", "old")
        assert old is not None
        assert [(version.version_digest, version.target_modules) for version in old.versions] == [("v1", ("k_proj",))]
        assert [base.base_id for base in await reader.bases()] == ["tiny"]
        assert await reader.api_keys("default") == [key]
    await engine.dispose()
