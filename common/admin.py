"""What every service tells its operators over HTTP: /livez, /readyz, /metrics and /debug/resources.

The router serves these paths beside its API, the others on an admin port of their own. Nothing here names a model, a
tenant or a request.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import structlog
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from common.activity import Activity, num_open_files
from common.http_connection import HttpLimits
from common.http_server import HttpServer, bind
from common.metrics import CONTENT_TYPE

log = structlog.get_logger(__name__)

_STOP_S: Final = 1.0
"""What a request that is being answered gets when the service ends."""


@dataclass(frozen=True, slots=True)
class Admin:
    """Where the answers come from; each is asked anew every time."""

    why_not_ready: Callable[[], str | None]
    """Why requests are not taken now, or None."""
    metrics: Callable[[], Awaitable[bytes]]
    """All metrics in Prometheus' text format."""
    resources: Callable[[], Mapping[str, int]]
    """What is held for requests now: zero wherever nobody asks anything (`open_files`: as before)."""


def held_by(activity: Activity) -> dict[str, int]:
    """Return the resources that every service has."""
    return {
        "streams": activity.num_requests,
        "tasks": activity.num_tasks,
        "open_files": num_open_files(),
        "all_tasks": len(asyncio.all_tasks()),
    }


def admin_routes(admin: Admin) -> list[Route]:
    """Return the routes, for an application of one's own."""

    async def livez(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_: Request) -> Response:
        why = admin.why_not_ready()
        return PlainTextResponse("ok\n") if why is None else PlainTextResponse(f"{why}\n", status_code=503)

    async def metrics(_: Request) -> Response:
        return Response(await admin.metrics(), media_type=CONTENT_TYPE)

    async def resources(_: Request) -> Response:
        return JSONResponse(dict(admin.resources()))

    return [
        Route("/livez", livez),
        Route("/readyz", readyz),
        Route("/metrics", metrics),
        Route("/debug/resources", resources),
    ]


def bind_admin(host: str, port: int) -> socket.socket:
    """Return the listening socket of an admin port. Raises FailedPrecondition, naming --admin-port."""
    return bind(host, port, "--admin-port")


@asynccontextmanager
async def serving_admin(listener: socket.socket, admin: Admin, limits: HttpLimits) -> AsyncIterator[int]:
    """Serve the admin port for as long as the block lasts; gives its number. The socket is closed afterwards."""
    with listener:
        host, port = listener.getsockname()[:2]
        server = HttpServer(Starlette(routes=admin_routes(admin)), stop_timeout_s=_STOP_S, limits=limits)
        serving = asyncio.create_task(server.serve([listener]), name="admin")
        log.info("admin.listening", host=host, port=port)
        try:
            yield port
        finally:
            server.stop()
            await serving
