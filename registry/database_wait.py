"""Waits for a database server that starts together with the registry, as containers do."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import sqlalchemy as sa
import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from common.backoff import Backoff

log = structlog.get_logger(__name__)

_BACKOFF: Final = Backoff(first_s=0.1, longest_s=2.0)


async def wait_for_database(engine: AsyncEngine, patience_s: float) -> None:
    """Return once the server takes a connection, or after `patience_s`: what uses it next then tells what is wrong.

    SQLite is a file and is never waited for.
    """
    if engine.dialect.name == "sqlite":
        return
    until_s, failures = time.monotonic() + patience_s, 0
    while True:
        try:
            async with engine.connect():
                return
        except sa.exc.OperationalError as error:
            failures += 1
            pause_s = _BACKOFF.pause_s(failures)
            if time.monotonic() + pause_s > until_s:
                return
            if failures == 1:
                where = engine.url.render_as_string(hide_password=True)
                log.warning("database.waiting", database=where, patience_s=patience_s, error=str(error.orig))
            await asyncio.sleep(pause_s)  # a server that starts has no event to tell us
