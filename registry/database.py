"""The connection to SQL: one engine for SQLite or PostgreSQL, and the migrations that bring its tables up to date."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from loraplex.errors import FailedPrecondition

_MIGRATIONS: Final = Path(__file__).parent / "migrations"
_MIGRATION_LOCK: Final = 0x6C6F7261  # PostgreSQL advisory lock: replicas that start together migrate one by one
_BUSY_TIMEOUT_S: Final = 30.0
_DRIVERS: Final = {
    "sqlite": "sqlite+aiosqlite",
    "sqlite+aiosqlite": "sqlite+aiosqlite",
    "postgresql": "postgresql+psycopg",
    "postgres": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
}


def parse_url(text: str) -> sa.URL:
    """Return the URL with the async driver that this program uses. Raises ValueError, saying what is accepted."""
    try:
        url = sa.make_url(text)
    except sa.exc.ArgumentError as error:
        raise ValueError("not a database URL; use sqlite:///PATH or postgresql://USER@HOST/NAME") from error
    if url.drivername not in _DRIVERS:
        raise ValueError(f"{url.drivername} is not supported; use sqlite:///PATH or postgresql://USER@HOST/NAME")
    if url.drivername.startswith("sqlite") and not url.database:
        raise ValueError("a registry in memory would forget everything; use sqlite:///PATH")
    return url.set(drivername=_DRIVERS[url.drivername])


def open_engine(url: sa.URL) -> AsyncEngine:
    """Return an engine.

    On SQLite, transactions are explicit: an engine with the execution option `immediate` takes the write lock at once
    (`BEGIN IMMEDIATE`), others read a snapshot. Raises FailedPrecondition where SQLite's file has no folder.
    """
    if url.get_backend_name() != "sqlite":
        return create_async_engine(url, pool_pre_ping=True)
    if not Path(url.database or "").absolute().parent.is_dir():
        raise FailedPrecondition(f"the folder of the database {url.database} does not exist", field="database_url")
    engine = create_async_engine(url, connect_args={"timeout": _BUSY_TIMEOUT_S})

    @sa.event.listens_for(engine.sync_engine, "connect")
    def on_connect(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # the driver must not begin transactions of its own
        cursor = connection.cursor()
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @sa.event.listens_for(engine.sync_engine, "begin")
    def on_begin(connection: sa.Connection) -> None:
        immediate = connection.get_execution_options().get("immediate", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")

    return engine


async def migrate(engine: AsyncEngine) -> None:
    """Bring the tables up to date. Raises FailedPrecondition where the database is unreachable, foreign or newer."""
    where = engine.url.render_as_string(hide_password=True)
    try:
        async with engine.execution_options(immediate=True).begin() as connection:
            if engine.dialect.name == "postgresql":
                await connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
            await connection.run_sync(upgrade)
    except CommandError as error:
        raise FailedPrecondition(
            f"the database {where} was made by a newer version of this program: {error}; upgrade the program"
        ) from error
    except sa.exc.DBAPIError as error:
        raise FailedPrecondition(f"the database {where} cannot be used: {error.orig}") from error


def upgrade(connection: sa.Connection) -> None:
    """Run all migrations on a connection."""
    command.upgrade(alembic_config(connection), "head")


def alembic_config(connection: sa.Connection) -> Config:
    """Return what Alembic's commands need to work on a connection."""
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config
