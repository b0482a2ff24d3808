"""Fixtures: a fresh database for each test, of both kinds that a registry runs on.

PostgreSQL is a server that the tests start. Where none can be had, its tests are skipped; with
LORAPLEX_TEST_POSTGRESQL=required they fail. LORAPLEX_TEST_DATABASE_URL names a server to use instead (a role that can
create databases).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import pytest
import sqlalchemy as sa

from tests.postgres_server import NoServer, PostgresServer, running_server

NOT_TESTED: Final = "not tested on PostgreSQL"

FreshDatabase = Callable[[], AbstractContextManager[str | None]]
"""Lends the URL of an empty database; None leaves the registry its SQLite file."""


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A PostgreSQL server, one per test process."""
    if url := os.environ.get("LORAPLEX_TEST_DATABASE_URL"):
        yield PostgresServer(sa.make_url(url))
        return
    try:
        with running_server() as server:
            yield server
    except NoServer as error:
        if os.environ.get("LORAPLEX_TEST_POSTGRESQL") == "required":
            pytest.fail(f"{NOT_TESTED}, though LORAPLEX_TEST_POSTGRESQL=required: {error}", pytrace=False)
        pytest.skip(f"{NOT_TESTED}: {error}")


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def database_kind(request: pytest.FixtureRequest) -> str:
    """Which database the test runs on: it runs on both."""
    return str(request.param)


@pytest.fixture(scope="module")
def fresh_database(database_kind: str, request: pytest.FixtureRequest) -> FreshDatabase:
    """A lender of empty databases."""
    if database_kind == "sqlite":
        return nullcontext
    server: PostgresServer = request.getfixturevalue("postgres_server")
    return server.database


@pytest.fixture
def database_url(fresh_database: FreshDatabase) -> Iterator[str | None]:
    """The URL of an empty database, or None for the registry's SQLite file."""
    with fresh_database() as url:
        yield url


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """The URL of an empty PostgreSQL database, for what has no meaning on SQLite."""
    with postgres_server.database() as url:
        yield url


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None]:
    """Say aloud, below everything else, what was skipped for want of a server."""
    yield
    reasons = [str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", ()) if report.longrepr]
    missed = [reason for reason in reasons if NOT_TESTED in reason]
    if missed:
        terminalreporter.section(f"{len(missed)} tests {NOT_TESTED}", sep="!", red=True, bold=True)
        terminalreporter.line(missed[0])
