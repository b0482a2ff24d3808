"""Follows the store's revision for watchers: NOTIFY on PostgreSQL, and a look at the database every second anyway.

On SQLite this process is the only writer, so the look finds nothing that the signal does not know.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import psycopg
import sqlalchemy as sa
import structlog

from loraplex.errors import Unavailable
from registry.head_signal import HeadSignal
from registry.store import NOTIFY_CHANNEL, Store

log = structlog.get_logger(__name__)

_LOOK_EVERY_S: Final = 1.0

_Connection = psycopg.AsyncConnection[tuple[object, ...]]


async def follow_head(store: Store, signal: HeadSignal, url: sa.URL) -> None:
    """Advance the signal until it closes. A database that is away is looked for every second."""
    notifications = _Notifications(url) if url.get_backend_name() == "postgresql" else None
    try:
        while not signal.closed:
            try:
                async with store.read() as reader:
                    signal.advance((await reader.head()).revision)
                if notifications is None:
                    await signal.wait_beyond(signal.revision, _LOOK_EVERY_S)
                else:
                    await notifications.wait(signal, _LOOK_EVERY_S)
            except (psycopg.OperationalError, Unavailable) as error:
                log.warning("registry.database_unreachable", error=str(error))
                await signal.wait_beyond(signal.revision, _LOOK_EVERY_S)
    finally:
        if notifications is not None:
            await notifications.close()


class _Notifications:
    """One connection that listens; opened when first waited on and again after it broke."""

    def __init__(self, url: sa.URL) -> None:
        # As the engine connects; a URL that SQLAlchemy reads is not always one that libpq reads.
        self._arguments: dict[str, Any] = dict(url.get_dialect()().create_connect_args(url)[1])
        self._connection: _Connection | None = None

    async def wait(self, signal: HeadSignal, timeout_s: float) -> None:
        """Return at the next notification, when the signal closes, or after `timeout_s`."""
        try:
            if self._connection is None:
                self._connection = await psycopg.AsyncConnection.connect(autocommit=True, **self._arguments)
                await self._connection.execute(f"LISTEN {NOTIFY_CHANNEL}".encode())
            notified = asyncio.create_task(_next_notification(self._connection, timeout_s))
            closed = asyncio.create_task(signal.wait_closed(timeout_s))
            try:
                await asyncio.wait((notified, closed), return_when=asyncio.FIRST_COMPLETED)
            finally:
                notified.cancel()
                closed.cancel()
                ends = await asyncio.gather(notified, closed, return_exceptions=True)
            if isinstance(ends[0], Exception):
                raise ends[0]
        except psycopg.OperationalError:
            await self.close()
            raise

    async def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


async def _next_notification(connection: _Connection, timeout_s: float) -> None:
    async for _ in connection.notifies(timeout=timeout_s, stop_after=1):
        pass
