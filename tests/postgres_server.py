"""A private PostgreSQL server for tests: made in seconds, heard on a Unix socket only, gone when the tests are.

A shell that runs beside the tests owns the server and waits for the end of its standard input, which comes when the
tests end, however they end: a run that is killed leaves neither process nor folder.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa

USER: Final = "loraplex"
PASSWORD: Final = "p%ss w@rd:/?#"  # with all that a URL must quote
START_S: Final = 60.0
STOP_S: Final = 20.0
_PROGRAMS: Final = ("initdb", "pg_ctl", "postgres")
_RUN: Final = """
set -eu
programs=$1 folder=$2
shift 2
trap 'rm -rf "$folder"' EXIT
"$programs/initdb" --pgdata "$folder/data" --pwfile "$folder/password" --no-sync "$@"
cat "$folder/settings" >> "$folder/data/postgresql.conf"
"$programs/pg_ctl" start --wait --pgdata "$folder/data" --log "$folder/log" || { cat "$folder/log"; exit 1; }
echo ready
cat > /dev/null
"$programs/pg_ctl" stop --mode immediate --pgdata "$folder/data"
"""


class NoServer(Exception):
    """Why no PostgreSQL server can be had here."""


class PostgresServer:
    """A server, known by the URL of a database that a role which may create databases connects to."""

    def __init__(self, url: sa.URL, folder: Path | None = None) -> None:
        self._url = url.set(drivername="postgresql")
        self.folder = folder
        """Where it keeps everything, if it was started here."""

    def url(self, database: str) -> str:
        """Return the URL of one of its databases."""
        return self._url.set(database=database).render_as_string(hide_password=False)

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        """Run one statement outside of any transaction; returns its rows."""
        engine = sa.create_engine(self._url.set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT")
        try:
            with engine.connect() as connection:
                result = connection.exec_driver_sql(statement)
                return [tuple(row) for row in result] if result.returns_rows else []
        finally:
            engine.dispose()

    @contextmanager
    def database(self) -> Iterator[str]:
        """Lend the URL of an empty database that goes away afterwards, whoever is still connected to it."""
        name = f"loraplex_{uuid.uuid4().hex}"
        self.execute(f"CREATE DATABASE {name}")
        try:
            yield self.url(name)
        finally:
            self.execute(f"DROP DATABASE {name} WITH (FORCE)")


@contextmanager
def running_server() -> Iterator[PostgresServer]:
    """Run a server until the block ends. Raises NoServer, saying what is missing."""
    programs = _find_programs()
    folder = Path(tempfile.mkdtemp(prefix="loraplex-postgres-"))
    try:
        (folder / "password").write_text(PASSWORD)
        (folder / "settings").write_text(
            f"listen_addresses = ''\nunix_socket_directories = '{folder}'\n"
            "fsync = off\nsynchronous_commit = off\nfull_page_writes = off\n"
            "authentication_timeout = 10s\n"  # DROP DATABASE waits for a connection that was left half open
        )
        owner = _other_owner()
        if owner is not None:
            for path in (*folder.iterdir(), folder):
                os.chown(path, owner.pw_uid, owner.pw_gid)
        process = subprocess.Popen(
            ["/bin/sh", "-c", _RUN, "sh", str(programs), str(folder), *_initdb_options(programs)],
            cwd=folder,
            env={"PATH": os.defpath, "LC_ALL": "C"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C is for the tests, which let go of their databases first
            user=owner.pw_uid if owner else None,
            group=owner.pw_gid if owner else None,
            extra_groups=[] if owner else None,
        )
        try:
            _wait_ready(process)
            where = {"host": str(folder)}
            url = sa.URL.create("postgresql", USER, PASSWORD, database="postgres", query=where)
            yield PostgresServer(url, folder)
        finally:
            _end(process)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _find_programs() -> Path:
    """Return the folder of the server's programs; Debian keeps them off the PATH, one folder per version."""
    folders: list[Path] = []
    if pg_config := shutil.which("pg_config"):
        told = subprocess.run([pg_config, "--bindir"], capture_output=True, text=True, timeout=10, check=False)
        folders += [Path(told.stdout.strip())] if told.stdout.strip() else []
    packaged = Path("/usr/lib/postgresql").glob("*/bin")
    folders += sorted(packaged, key=lambda folder: [int(n) for n in re.findall(r"\d+", str(folder))], reverse=True)
    folders += [Path(found).parent for found in [shutil.which("initdb")] if found]
    for folder in folders:
        if all(os.access(folder / program, os.X_OK) for program in _PROGRAMS):
            return folder
    raise NoServer("its server programs are not installed (on Debian: apt install postgresql)")


def _other_owner() -> pwd.struct_passwd | None:
    """Return whom the server runs as where the tests run as root, which the server refuses; else None."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            return pwd.getpwnam(name)
    raise NoServer("it refuses to run as root, and there is no user postgres or nobody")


def _initdb_options(programs: Path) -> list[str]:
    """Return how a cluster is made: passwords are checked, and text sorts as people do, not as bytes."""
    told = subprocess.run([programs / "postgres", "--version"], capture_output=True, text=True, timeout=10, check=True)
    version = int(re.findall(r"\d+", told.stdout)[0])
    people = ("--locale-provider", "icu", "--icu-locale", "en-US") if version >= 15 else ()
    return ["--username", USER, "--auth", "scram-sha-256", "--encoding", "UTF8", "--locale", "C", *people]


def _wait_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    said: list[str] = []
    patience = threading.Timer(START_S, os.killpg, (process.pid, signal.SIGKILL))
    patience.start()
    try:
        for line in process.stdout:
            if line == "ready\n":
                return
            said.append(line)
    finally:
        patience.cancel()
    raise NoServer(f"it did not start within {START_S:g} s: {''.join(said[-20:])}")


def _end(process: subprocess.Popen[str]) -> None:
    try:
        process.communicate(timeout=STOP_S)  # closes its standard input
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
