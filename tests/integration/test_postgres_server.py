"""The PostgreSQL server that tests start: it goes with them, even where they are killed."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import psutil
import pytest

from tests.postgres_server import PostgresServer, running_server
from tests.running_registry import ROOT, eventually

RUN = """
from tests.postgres_server import running_server
with running_server() as server:
    print(server.folder, flush=True)
    input()
"""


def postmaster(folder: Path) -> psutil.Process:
    return psutil.Process(int((folder / "data" / "postmaster.pid").read_text().split()[0]))


def has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # between the two
        return True


@pytest.fixture(autouse=True)
def can_be_started(postgres_server: PostgresServer) -> None:
    if postgres_server.folder is None:
        pytest.skip("the tests were given a server")


async def test_a_server_does_not_outlive_tests_that_are_killed():
    pipe = asyncio.subprocess.PIPE
    tests = await asyncio.create_subprocess_exec(sys.executable, "-c", RUN, cwd=ROOT, stdin=pipe, stdout=pipe)
    try:
        assert tests.stdout is not None
        folder = Path((await tests.stdout.readline()).decode().strip())
        server = postmaster(folder)
        assert not has_ended(server)
    finally:
        tests.kill()
        await tests.wait()
    await eventually(lambda: has_ended(server) and not folder.exists())


async def test_tests_that_fail_take_their_server_with_them():
    servers = []

    def fail() -> None:
        with running_server() as server:
            assert server.folder is not None
            servers.append((postmaster(server.folder), server.folder))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    [(process, folder)] = servers
    assert not folder.exists()
    await eventually(lambda: has_ended(process))  # its folder goes a moment before it
