"""uvicorn as a part of a service process: our socket, our signals, our logs."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from common.file_limit import room_for_connections
from common.http_connection import HttpAnswer, HttpConfig, HttpLimits
from loraplex.errors import FailedPrecondition, InvalidRequest, LoraplexError, RequestTimeout

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


def plain_answer(error: LoraplexError) -> HttpAnswer:
    """Return an error that came before the application did, as a line of text."""
    status = 408 if isinstance(error, RequestTimeout) else 400 if isinstance(error, InvalidRequest) else 503
    headers = [(b"content-type", b"text/plain; charset=utf-8")]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()))
    return status, headers, f"{error.message}\n".encode()


def _within_files(limits: HttpLimits) -> HttpLimits:
    """Return limits that the process's limit on open files has room for."""
    room = room_for_connections(limits.max_connections, "--max-http-connections")
    return replace(limits, max_connections=room)


class HttpServer(uvicorn.Server):
    """Serves an application on a bound socket. Signals are the process's business, not uvicorn's.

    `answer` forms what is refused before the application hears of it.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        stop_timeout_s: float,
        limits: HttpLimits,
        answer: Callable[[LoraplexError], HttpAnswer] = plain_answer,
    ) -> None:
        self._stopping = asyncio.Event()
        super().__init__(
            HttpConfig(
                app,
                _within_files(limits),
                answer,
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
