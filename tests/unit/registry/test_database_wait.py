"""Waiting for a database server that starts later, against real sockets."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator

import pytest

from registry.database import open_engine, parse_url
from registry.database_wait import wait_for_database


@pytest.fixture
def absent() -> Iterator[socket.socket]:
    """Where nobody listens yet, and nobody else can."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken


async def test_a_server_that_stays_away_is_given_up_after_the_patience(absent):
    engine = open_engine(parse_url(f"postgresql://me:secret@127.0.0.1:{absent.getsockname()[1]}/x"))
    started_s = time.monotonic()
    async with asyncio.timeout(60):
        await wait_for_database(engine, 0.5)
    assert time.monotonic() - started_s >= 0.1
    await engine.dispose()


async def test_every_attempt_is_a_new_connection_until_the_server_takes_one(absent):
    attempts = 0
    enough = asyncio.Event()

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 3:
            enough.set()
        writer.close()

    engine = open_engine(parse_url(f"postgresql://me:secret@127.0.0.1:{absent.getsockname()[1]}/x?sslmode=disable"))
    waiting = asyncio.create_task(wait_for_database(engine, 600))
    await asyncio.sleep(0.3)  # refused meanwhile
    server = await asyncio.start_server(hang_up, sock=absent)
    async with asyncio.timeout(60):
        await enough.wait()
    assert not waiting.done()
    waiting.cancel()
    server.close()
    await server.wait_closed()
    await engine.dispose()


async def test_sqlite_is_never_waited_for(tmp_path):
    engine = open_engine(parse_url(f"sqlite:///{tmp_path / 'x.sqlite3'}"))
    await asyncio.wait_for(wait_for_database(engine, 600), 60)
    assert not (tmp_path / "x.sqlite3").exists()
    await engine.dispose()
