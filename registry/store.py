"""The source of truth in SQL: reads, and write transactions that each take the next revision. Decides nothing.

A write transaction begins by `UPDATE head SET revision = revision + 1 RETURNING revision`: the row's lock makes commit
order revision order, without gaps. What it changes goes into the change log under its revision. A transaction that
changes nothing rolls back and takes no revision.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass

import sqlalchemy as sa
import structlog
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from loraplex.errors import NoSpace, RegistryUnavailable
from registry.domain import (
    AdapterRecord,
    ApiKeyRecord,
    BaseModelRecord,
    Change,
    DeletedAdapter,
    DeletedApiKey,
    Entry,
    VersionRecord,
)
from registry.entries import decode_entries, encode_entries
from registry.evaluations import EvaluationRecord, decode_figures, encode_figures
from registry.reports import PackingReport, decode_report, encode_report
from registry.tables import ADAPTERS, API_KEYS, BASE_MODELS, CHANGES, EVALUATIONS, HEAD, VERSIONS

log = structlog.get_logger(__name__)

NOTIFY_CHANNEL = "loraplex_head"
_BASE_COLUMNS = [column for column in BASE_MODELS.c if column.name != "manifest"]
_VERSION_COLUMNS = [column for column in VERSIONS.c if column.name not in ("id", "report")]


@dataclass(frozen=True, slots=True)
class Head:
    """Which store this is and its newest revision."""

    store_id: str
    revision: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The whole catalog at one revision."""

    head: Head
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Totals:
    """How much is stored."""

    num_base_models: int
    num_adapters: int
    num_versions: int
    artifact_bytes: int
    """Of all artifacts that a version names, each once."""


class Reader:
    """Reads on one connection, all in one snapshot."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def head(self) -> Head:
        """Return the store's identity and newest revision."""
        row = (await self._connection.execute(sa.select(HEAD.c.store_id, HEAD.c.revision))).one()
        return Head(row.store_id, row.revision)

    async def base(self, base_id: str) -> BaseModelRecord | None:
        """Return a base model, or None."""
        query = sa.select(*_BASE_COLUMNS).where(BASE_MODELS.c.base_id == base_id)
        row = (await self._connection.execute(query)).mappings().one_or_none()
        return BaseModelRecord(**row) if row else None

    async def manifest(self, base_id: str) -> str | None:
        """Return a base model's manifest as it was put, or None."""
        query = sa.select(BASE_MODELS.c.manifest).where(BASE_MODELS.c.base_id == base_id)
        return (await self._connection.execute(query)).scalar_one_or_none()

    async def bases(self, after: str = "", limit: int | None = None) -> list[BaseModelRecord]:
        """Return base models by id, those after `after`."""
        query = sa.select(*_BASE_COLUMNS).where(BASE_MODELS.c.base_id > after).order_by(BASE_MODELS.c.base_id)
        rows = await self._connection.execute(query.limit(limit))
        return [BaseModelRecord(**row) for row in rows.mappings()]

    async def adapter(self, tenant: str, name: str) -> AdapterRecord | None:
        """Return an adapter with its versions, or None."""
        found = await self._adapters(sa.and_(ADAPTERS.c.tenant == tenant, ADAPTERS.c.name == name), None)
        return found[0] if found else None

    async def adapters(self, tenant: str, after: str = "", limit: int | None = None) -> list[AdapterRecord]:
        """Return a tenant's adapters by name, those after `after`."""
        return await self._adapters(sa.and_(ADAPTERS.c.tenant == tenant, ADAPTERS.c.name > after), limit)

    async def num_adapters(self, tenant: str) -> int:
        """Return how many adapters a tenant has."""
        query = sa.select(sa.func.count()).select_from(ADAPTERS).where(ADAPTERS.c.tenant == tenant)
        return int((await self._connection.execute(query)).scalar_one())

    async def reports(self, tenant: str, name: str) -> dict[str, PackingReport]:
        """Return what packing made of an adapter's versions, by version digest, newest first; some may have none."""
        query = sa.select(VERSIONS.c.version_digest, VERSIONS.c.report).filter_by(tenant=tenant, name=name)
        rows = await self._connection.execute(query.order_by(VERSIONS.c.id.desc()))
        return {row.version_digest: report for row in rows if (report := decode_report(row.report)) is not None}

    async def evaluations(self, tenant: str, name: str) -> list[EvaluationRecord]:
        """Return what workers measured of an adapter's artifacts, newest first."""
        query = sa.select(EVALUATIONS).filter_by(tenant=tenant, name=name)
        order = (EVALUATIONS.c.create_time_us.desc(), EVALUATIONS.c.artifact_digest)
        return [
            EvaluationRecord(
                row.version_digest, row.artifact_digest, row.format, decode_figures(row.figures), row.create_time_us
            )
            for row in await self._connection.execute(query.order_by(*order))
        ]

    async def snapshot(self) -> Snapshot:
        """Return the whole catalog and its revision."""
        head = await self.head()
        return Snapshot(
            head, (*await self.bases(), *await self._adapters(sa.true(), None), *await self._api_keys(sa.true(), None))
        )

    async def api_key(self, key_id: str) -> ApiKeyRecord | None:
        """Return an API key by its id, or None."""
        return next(iter(await self._api_keys(API_KEYS.c.key_id == key_id, None)), None)

    async def api_key_named(self, tenant: str, name: str) -> ApiKeyRecord | None:
        """Return a tenant's API key by its name, or None."""
        return next(
            iter(await self._api_keys(sa.and_(API_KEYS.c.tenant == tenant, API_KEYS.c.name == name), None)), None
        )

    async def api_keys(self, tenant: str, after: str = "", limit: int | None = None) -> list[ApiKeyRecord]:
        """Return a tenant's API keys by id, those after `after`."""
        return await self._api_keys(sa.and_(API_KEYS.c.tenant == tenant, API_KEYS.c.key_id > after), limit)

    async def _api_keys(self, which: sa.ColumnElement[bool], limit: int | None) -> list[ApiKeyRecord]:
        query = sa.select(API_KEYS).where(which).order_by(API_KEYS.c.key_id).limit(limit)
        return [ApiKeyRecord(**row) for row in (await self._connection.execute(query)).mappings()]

    async def changes(self, after: int, limit: int) -> list[Change]:
        """Return the logged transactions after a revision, oldest first."""
        query = sa.select(CHANGES).where(CHANGES.c.revision > after).order_by(CHANGES.c.revision).limit(limit)
        return [Change(row.revision, decode_entries(row.payload)) for row in await self._connection.execute(query)]

    async def totals(self) -> Totals:
        """Return how much is stored."""
        artifacts = sa.union(  # each once
            sa.select(VERSIONS.c.artifact_digest, VERSIONS.c.artifact_bytes),
            sa.select(VERSIONS.c.source_digest, VERSIONS.c.source_bytes),
        ).subquery()
        counts = sa.select(
            *(
                sa.select(sa.func.count()).select_from(table).scalar_subquery()
                for table in (BASE_MODELS, ADAPTERS, VERSIONS)
            ),
            sa.select(sa.func.coalesce(sa.func.sum(artifacts.c.artifact_bytes), 0)).scalar_subquery(),
        )
        return Totals(*(int(count) for count in (await self._connection.execute(counts)).one()))

    async def artifact_digests(self) -> set[str]:
        """Return the digests of all artifacts that versions name, as their artifact or their source."""
        columns = (VERSIONS.c.artifact_digest, VERSIONS.c.source_digest)
        query = sa.union(*(sa.select(column).where(column != "") for column in columns))
        return set((await self._connection.execute(query)).scalars())

    async def referenced(self, artifact_digests: Collection[str]) -> set[str]:
        """Return those of the digests that some version names, as its artifact or its source."""
        found: set[str] = set()
        digests = sorted(artifact_digests)
        for at in range(0, len(digests), 500):
            for column in (VERSIONS.c.artifact_digest, VERSIONS.c.source_digest):
                query = sa.select(column).where(column.in_(digests[at : at + 500])).distinct()
                found.update((await self._connection.execute(query)).scalars())
        return found

    async def _adapters(self, which: sa.ColumnElement[bool], limit: int | None) -> list[AdapterRecord]:
        page = sa.select(ADAPTERS).where(which).order_by(ADAPTERS.c.tenant, ADAPTERS.c.name).limit(limit).subquery()
        both = sa.and_(VERSIONS.c.tenant == page.c.tenant, VERSIONS.c.name == page.c.name)
        versions: dict[tuple[str, str], list[VersionRecord]] = {}
        newest_first = sa.select(*_VERSION_COLUMNS).join(page, both).order_by(VERSIONS.c.id.desc())
        for row in (await self._connection.execute(newest_first)).mappings():
            fields = dict(row)
            key = (fields.pop("tenant"), fields.pop("name"))
            fields["target_modules"] = tuple(fields["target_modules"].split(","))
            versions.setdefault(key, []).append(VersionRecord(**fields))
        rows = await self._connection.execute(sa.select(page).order_by(page.c.tenant, page.c.name))
        return [AdapterRecord(**row, versions=tuple(versions[row["tenant"], row["name"]])) for row in rows.mappings()]


class WriteTransaction(Reader):
    """One transaction; holds the write lock until it ends. `revision` is what it commits as."""

    def __init__(self, connection: AsyncConnection, revision: int) -> None:
        super().__init__(connection)
        self.revision = revision
        self.entries: list[Entry] = []

    async def put_base(self, base: BaseModelRecord, manifest: str) -> None:
        """Add a base model."""
        await self._connection.execute(sa.insert(BASE_MODELS).values(**asdict(base), manifest=manifest))
        self.entries.append(base)

    async def put_adapter(self, adapter: AdapterRecord, reports: Mapping[str, PackingReport] | None = None) -> None:
        """Add an adapter or bring the stored one to this state; versions are added or changed, never taken away.

        `reports` are new ones, by version digest.
        """
        fields = {name: value for name, value in asdict(adapter).items() if name != "versions"}
        key = {"tenant": adapter.tenant, "name": adapter.name}
        known = await self.adapter(adapter.tenant, adapter.name)
        if known is None:
            await self._connection.execute(sa.insert(ADAPTERS).values(**fields))
        else:
            await self._connection.execute(sa.update(ADAPTERS).filter_by(**key).values(**fields))
        stored = {version.version_digest: version for version in known.versions} if known else {}
        for version in reversed(adapter.versions):  # oldest first, so that the newest gets the highest id
            if stored.get(version.version_digest) == version:
                continue
            row = {**asdict(version), "target_modules": ",".join(version.target_modules)}
            if version.version_digest in stored:
                where = {**key, "version_digest": version.version_digest}
                await self._connection.execute(sa.update(VERSIONS).filter_by(**where).values(**row))
            else:
                await self._connection.execute(sa.insert(VERSIONS).values(**key, **row))
        for digest, report in (reports or {}).items():
            where = {**key, "version_digest": digest}
            written = sa.update(VERSIONS).filter_by(**where).values(report=encode_report(report))
            await self._connection.execute(written)
        self.entries.append(adapter)

    async def put_evaluation(self, adapter: AdapterRecord, evaluation: EvaluationRecord) -> None:
        """Add what a worker measured, in the place of what is known of that artifact."""
        key = {"tenant": adapter.tenant, "name": adapter.name, "artifact_digest": evaluation.artifact_digest}
        await self._connection.execute(sa.delete(EVALUATIONS).filter_by(**key))
        row = {
            "version_digest": evaluation.version_digest,
            "format": evaluation.format,
            "figures": encode_figures(evaluation.figures),
            "create_time_us": evaluation.create_time_us,
        }
        await self._connection.execute(sa.insert(EVALUATIONS).values(**key, **row))
        self.entries.append(adapter)  # as it was: the catalog does not tell of evaluations

    async def delete_adapter(self, tenant: str, name: str) -> None:
        """Delete an adapter with its versions."""
        for table in (EVALUATIONS, VERSIONS, ADAPTERS):
            await self._connection.execute(sa.delete(table).filter_by(tenant=tenant, name=name))
        self.entries.append(DeletedAdapter(tenant, name))

    async def put_api_key(self, key: ApiKeyRecord) -> None:
        """Add an API key."""
        await self._connection.execute(sa.insert(API_KEYS).values(**asdict(key)))
        self.entries.append(key)

    async def delete_api_key(self, key_id: str) -> None:
        """Revoke an API key."""
        await self._connection.execute(sa.delete(API_KEYS).filter_by(key_id=key_id))
        self.entries.append(DeletedApiKey(key_id))


class Store:
    """Owns the engine's transactions. `on_commit` is told each revision this process commits."""

    def __init__(self, engine: AsyncEngine, *, keep_changes: int, on_commit: Callable[[int], None]) -> None:
        snapshot_reads = {"isolation_level": "REPEATABLE READ"} if engine.dialect.name == "postgresql" else {}
        self._readers = engine.execution_options(**snapshot_reads)
        self._writers = engine.execution_options(immediate=True)
        self._keep_changes = keep_changes
        self._on_commit = on_commit
        self._write_turn = asyncio.Lock()  # waiting here costs no connection

    @asynccontextmanager
    async def read(self) -> AsyncIterator[Reader]:
        """Open one snapshot for reading."""
        with _typed_failures():
            async with self._readers.begin() as connection:
                yield Reader(connection)

    @asynccontextmanager
    async def write(self) -> AsyncIterator[WriteTransaction]:
        """Open a write transaction; it commits at the end of the block where it changed something."""
        with _typed_failures():
            async with self._write_turn:
                async with self._writers.connect() as connection, connection.begin() as sql_transaction:
                    next_revision = sa.update(HEAD).values(revision=HEAD.c.revision + 1).returning(HEAD.c.revision)
                    transaction = WriteTransaction(connection, (await connection.execute(next_revision)).scalar_one())
                    yield transaction
                    if not transaction.entries:
                        transaction.revision -= 1  # what the caller tells of is the revision that stays
                        await sql_transaction.rollback()
                        return
                    await self._log(connection, transaction)
                self._on_commit(transaction.revision)

    async def _log(self, connection: AsyncConnection, transaction: WriteTransaction) -> None:
        revision = transaction.revision
        payload = encode_entries(transaction.entries)
        await connection.execute(sa.insert(CHANGES).values(revision=revision, payload=payload))
        await connection.execute(sa.delete(CHANGES).where(CHANGES.c.revision <= revision - self._keep_changes))
        if connection.dialect.name == "postgresql":
            await connection.execute(sa.select(sa.func.pg_notify(NOTIFY_CHANNEL, str(revision))))


@contextmanager
def _typed_failures() -> Iterator[None]:
    """Turn what happens to databases now and then into errors that clients understand."""
    try:
        yield
    except (sa.exc.OperationalError, sa.exc.InterfaceError, sa.exc.TimeoutError) as error:
        cause = str(getattr(error, "orig", error))  # without the statement and its values
        log.warning("registry.database_failed", error=cause)
        if "disk is full" in cause:
            raise NoSpace(
                "the disk of the registry's database is full; delete adapters (loraplex adapter rm NAME), or free some "
                "space on that disk"
            ) from error
        raise RegistryUnavailable("the registry's database cannot be reached; try again", retry_after_s=1.0) from error
