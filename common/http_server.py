"""uvicorn as a part of a service process: our socket, our signals, our logs."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from loraplex.errors import FailedPrecondition

_BACKLOG: Final = 2048
_KEEP_ALIVE_S: Final = 75  # longer than common load balancers keep an idle connection


def bind(host: str, port: int, option: str) -> socket.socket:
    """Return a listening socket; port 0 takes a free one.

    Raises FailedPrecondition where the port cannot be had, naming it and the `option` that chooses another.
    """
    bare = host.strip("[]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    try:
        return socket.create_server((bare, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise FailedPrecondition(
            f"cannot listen on {host}:{port} for HTTP: {error.strerror or error}; stop the other process or choose "
            f"another port with {option}",
            field=option.removeprefix("--").replace("-", "_"),
        ) from error


class HttpServer(uvicorn.Server):
    """Serves an application on a bound socket. Signals are the process's business, not uvicorn's."""

    def __init__(self, app: ASGIApp, *, stop_timeout_s: float) -> None:
        self._stopping = asyncio.Event()
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=max(1, round(stop_timeout_s)),
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signal handlers alone."""
        yield

    async def main_loop(self) -> None:
        """Wait for `stop`; once a second renew the Date header, which is all that uvicorn's ten ticks a second do."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._stopping.wait()

    def stop(self) -> None:
        """Close idle connections, let running requests end, then return from `serve`."""
        self.should_exit = True
        self._stopping.set()
