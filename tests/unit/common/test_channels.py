"""Every channel of the product finds a peer that is back within about two seconds, and tries no call again itself."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from common.rpc import open_channel
from loraplex.async_client import AsyncClient
from loraplex.calls import CHANNEL_OPTIONS, Peer
from loraplex.client import Client
from loraplex.errors import LoraplexError, Unavailable

TREE = Path(__file__).resolve().parents[3]
AWAY_S = 7.0
"""Long enough for a back-off without a bound to have grown far beyond what is wanted."""
FOUND_S = 2.5
PAUSE_S = 0.05
SLOW_HANDSHAKE_S = 1.5
"""A machine that is short of processors answers a connection so late."""


def test_every_channel_is_opened_with_the_projects_options():
    opened = {
        f"{file.relative_to(TREE)}: {call.strip()}"
        for part in ("loraplex", "common", "registry", "router", "worker")
        for file in (TREE / part).rglob("*.py")
        for call in re.findall(r"\w+\.(?:in)?secure_channel\(.*", file.read_text())
    }
    assert opened
    assert [call for call in opened if "CHANNEL_OPTIONS" not in call] == []
    options = dict(CHANNEL_OPTIONS)
    assert options["grpc.max_reconnect_backoff_ms"] <= 1_000
    assert options["grpc.enable_retries"] == 0


async def serve(port: int = 0) -> tuple[aio.Server, int]:
    server = aio.server(options=[("grpc.so_reuseport", 0)])
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server, bound


async def answers(get: Callable[[], Awaitable[object]]) -> bool:
    """Tell whether a call gets to the peer; it has no such method, which is an answer too."""
    try:
        await get()
    except Unavailable:
        return False
    except LoraplexError:
        return True
    return True


async def within(limit_s: float, get: Callable[[], Awaitable[object]]) -> bool:
    """Tell whether a peer is found in time: the time slept, so that a machine that stands still loses none."""
    slept_s = 0.0
    while not await answers(get):
        if slept_s > limit_s:
            return False
        await asyncio.sleep(PAUSE_S)
        slept_s += PAUSE_S
    return True


async def test_a_peer_that_was_away_for_long_is_found_soon_after_it_is_back():
    kept = socket.socket()  # bound, not listening: while the peer is away nobody else gets its port
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", 0))
    server, port = await serve(kept.getsockname()[1])
    address = f"127.0.0.1:{port}"
    service = open_channel(address)

    async def check_health() -> None:
        with Peer("router", address).calls():
            await health_pb2_grpc.HealthStub(service).Check(health_pb2.HealthCheckRequest(service="none"), timeout=60)

    async with AsyncClient(address) as asynchronous:
        with Client(address) as synchronous:
            calls: list[Callable[[], Awaitable[object]]] = [
                check_health,
                lambda: asynchronous.get_model("any"),
                lambda: asyncio.to_thread(synchronous.get_model, "any"),
            ]
            try:
                assert await asyncio.gather(*(within(30, call) for call in calls)) == [True] * 3
                await server.stop(0)
                assert await asyncio.gather(*(within(AWAY_S, call) for call in calls)) == [False] * 3
                server, _ = await serve(port)
                assert await asyncio.gather(*(within(FOUND_S, call) for call in calls)) == [True] * 3
            finally:
                await service.close()
                await server.stop(0)
                kept.close()


async def test_a_peer_that_is_slow_to_shake_hands_is_reached():
    server, port = await serve()

    handlers: set[asyncio.Task[None] | None] = set()

    async def after_a_while(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.add(asyncio.current_task())
        await asyncio.sleep(SLOW_HANDSHAKE_S)
        there, to_there = await asyncio.open_connection("127.0.0.1", port)
        try:
            await asyncio.gather(_copy(reader, to_there), _copy(there, writer), return_exceptions=True)
        finally:
            for side in (writer, to_there):
                side.close()
                with contextlib.suppress(ConnectionError):
                    await side.wait_closed()

    proxy = await asyncio.start_server(after_a_while, "127.0.0.1", 0)
    async with proxy:
        async with AsyncClient(f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}") as client:
            assert await within(30, lambda: client.get_model("any"))
        await server.stop(0)
        async with asyncio.timeout(60):
            await asyncio.gather(*(task for task in handlers if task is not None), return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(2**16):
        writer.write(data)
    writer.close()
