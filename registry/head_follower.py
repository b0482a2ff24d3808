"""Follows the store's revision for watchers: NOTIFY on PostgreSQL, and a look at the database every second anyway.

On SQLite this process is the only writer, so the look finds nothing that the signal does not know.
"""

from __future__ import annotations

from typing import Final

import psycopg
import sqlalchemy as sa
import structlog

from loraplex.errors import Unavailable
from registry.head_signal import HeadSignal
from registry.store import NOTIFY_CHANNEL, Store

log = structlog.get_logger(__name__)

_LOOK_EVERY_S: Final = 1.0


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
                    await notifications.wait(_LOOK_EVERY_S)
            except (psycopg.OperationalError, Unavailable) as error:
                log.warning("registry.database_unreachable", error=str(error))
                await signal.wait_beyond(signal.revision, _LOOK_EVERY_S)
    finally:
        if notifications is not None:
            await notifications.close()


class _Notifications:
    """One connection that listens; opened when first waited on and again after it broke."""

    def __init__(self, url: sa.URL) -> None:
        self._conninfo = url.set(drivername="postgresql").render_as_string(hide_password=False)
        self._connection: psycopg.AsyncConnection[tuple[object, ...]] | None = None

    async def wait(self, timeout_s: float) -> None:
        """Return at the next notification, or after `timeout_s`."""
        try:
            if self._connection is None:
                self._connection = await psycopg.AsyncConnection.connect(self._conninfo, autocommit=True)
                await self._connection.execute(f"LISTEN {NOTIFY_CHANNEL}".encode())
            async for _ in self._connection.notifies(timeout=timeout_s, stop_after=1):
                pass
        except psycopg.OperationalError:
            await self.close()
            raise

    async def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
