"""Clients that send slowly or nothing, over real sockets: each is cut in time, and none keeps others out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from common import http_connection
from common.file_limit import raise_file_limit
from common.http_connection import Connection, HttpAnswer, HttpLimits
from common.http_server import HttpServer, bind
from loraplex.errors import LoraplexError

ASK = b"GET / HTTP/1.1\r\nhost: test\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: test\r\ncontent-length: 1000\r\n\r\n"


class App:
    """Reads the whole body of a POST, then answers; notes what it was told of the client."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.num_held = 0
        self.hold = asyncio.Event()
        self.hold.set()
        self.body = b"answer"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST":
            message = await receive()
            while message["type"] == "http.request" and message["more_body"]:
                message = await receive()
            if message["type"] == "http.disconnect":
                self.left.set()
                return
        self.num_held += 1
        await self.hold.wait()
        self.num_held -= 1
        headers = [(b"content-length", str(len(self.body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


@pytest.fixture
async def app() -> App:
    return App()


@asynccontextmanager
async def serving(
    app: App, limits: HttpLimits, answer: Callable[[LoraplexError], HttpAnswer] | None = None
) -> AsyncIterator[int]:
    options: dict[str, Any] = {} if answer is None else {"answer": answer}
    with bind("127.0.0.1", 0, "--port") as listener:
        server = HttpServer(app, stop_timeout_s=1, limits=limits, **options)
        running = asyncio.create_task(server.serve([listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            server.stop()
            async with asyncio.timeout(60):
                await running


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, port: int, first: bytes = b"") -> Client:
        made = cls(*await asyncio.open_connection("127.0.0.1", port))
        made.writer.write(first)
        return made

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        async with asyncio.timeout(60):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            status, *lines = head.strip().split("\r\n")
            headers = {key.lower(): value for key, value in (line.split(": ", 1) for line in lines)}
            return int(status.split()[1]), headers, await self.reader.readexactly(int(headers["content-length"]))

    async def rest(self) -> bytes:
        """Return what comes until the server closes; it must."""
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionError):
                return await self.reader.read()
            return b""

    async def trickle(self, every_s: float = 0.05) -> None:
        """Send a byte at a time until the server closes."""
        with contextlib.suppress(ConnectionError):
            while not self.reader.at_eof():
                self.writer.write(b"a")
                await self.writer.drain()
                await asyncio.sleep(every_s)

    def close(self) -> None:
        self.writer.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - conditions of connections, which have no event
            await asyncio.sleep(0.01)


async def test_a_client_that_sends_nothing_is_closed(app: App) -> None:
    async with serving(app, HttpLimits(read_timeout_s=0.3)) as port:
        client = await Client.to(port)
        assert await client.rest() == b""
        client.close()


async def test_a_head_at_a_trickle_is_answered_408(app: App) -> None:
    async with serving(app, HttpLimits(read_timeout_s=0.4)) as port:
        client = await Client.to(port, b"GET / HTTP/1.1\r\nx: ")
        trickling = asyncio.create_task(client.trickle())
        status, headers, body = await client.answer()
        assert (status, headers["connection"]) == (408, "close")
        assert b"head" in body
        assert await client.rest() == b""
        await trickling
        client.close()


async def test_a_second_head_at_a_trickle_is_answered_408(app: App) -> None:
    async with serving(app, HttpLimits(read_timeout_s=0.4)) as port:
        client = await Client.to(port, ASK)
        assert (await client.answer())[0] == 200
        client.writer.write(b"GET / HTTP/1.1\r\nx: ")
        trickling = asyncio.create_task(client.trickle())
        assert (await client.answer())[0] == 408
        await trickling
        client.close()


async def test_a_body_at_a_trickle_is_cut_and_the_application_hears_it(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connection, "_APP_FIRST_S", 0.0)
    async with serving(app, HttpLimits(read_timeout_s=0.4)) as port:
        client = await Client.to(port, POST)
        async with asyncio.timeout(60):
            await client.trickle()
        client.close()
        async with asyncio.timeout(60):
            await app.left.wait()


async def test_a_body_that_trickles_on_after_the_answer_is_cut(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "_LINGER_S", 0.3)
    async with serving(app, HttpLimits()) as port:
        client = await Client.to(port, b"GET / HTTP/1.1\r\nhost: test\r\ncontent-length: 1000\r\n\r\n")
        trickling = asyncio.create_task(client.trickle())
        assert (await client.answer())[0] == 200
        assert await client.rest() == b""
        await trickling
        client.close()


async def test_a_body_that_ends_after_its_answer_leaves_the_connection_usable(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connection, "_LINGER_S", 60.0)
    async with serving(app, HttpLimits()) as port:
        client = await Client.to(port, b"GET / HTTP/1.1\r\nhost: test\r\ncontent-length: 3\r\n\r\nab")
        assert (await client.answer())[0] == 200
        client.writer.write(b"c" + ASK)
        assert (await client.answer())[0] == 200
        client.close()


async def test_a_slow_answer_and_a_slow_but_timely_body_are_not_cut(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "_APP_FIRST_S", 60.0)
    async with serving(app, HttpLimits(read_timeout_s=0.4)) as port:
        app.hold.clear()
        client = await Client.to(port, POST)
        await asyncio.sleep(0.2)
        client.writer.write(b"a" * 1000)
        await asyncio.sleep(0.6)  # answering takes as long as it takes
        app.hold.set()
        assert (await client.answer())[0] == 200
        client.close()


async def test_a_client_that_does_not_take_its_answer_is_cut_when_the_connection_closes(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connection, "_FLUSH_S", 0.3)
    cut, lost = asyncio.Event(), Connection.connection_lost

    def told(connection: Connection, exc: Exception | None) -> None:
        lost(connection, exc)
        cut.set()

    monkeypatch.setattr(Connection, "connection_lost", told)
    app.body = b"x" * 50_000_000
    async with serving(app, HttpLimits()) as port:
        client = await Client.to(port, b"GET / HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n")
        client.writer.transport.pause_reading()  # type: ignore[attr-defined] # a read transport too
        async with asyncio.timeout(60):
            await cut.wait()
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert len(await client.rest()) < len(app.body)
        client.close()


async def test_idle_connections_give_way_oldest_first(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "_SETTLING_S", 0.0)
    async with serving(app, HttpLimits(max_connections=3)) as port:
        idle = await Client.to(port)
        kept_alive = await Client.to(port, ASK)
        assert (await kept_alive.answer())[0] == 200
        trickling = await Client.to(port, POST)
        await asyncio.sleep(0.05)
        app.hold.clear()
        newcomers = []
        for gives_way in (idle, kept_alive, trickling):
            newcomers.append(await Client.to(port, ASK))
            assert await gives_way.rest() == b""
            gives_way.close()
        app.hold.set()
        for client in newcomers:
            assert (await client.answer())[0] == 200
            client.close()


async def test_one_connection_too_many_is_told_503_when_all_others_work(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connection, "_SETTLING_S", 60.0)
    async with serving(app, HttpLimits(max_connections=2)) as port:
        app.hold.clear()
        working = [await Client.to(port, ASK) for _ in range(2)]
        await until(lambda: app.num_held == 2)
        refused = await Client.to(port, ASK)
        status, headers, _ = await refused.answer()
        assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
        assert await refused.rest() == b""
        app.hold.set()
        for client in working:
            assert (await client.answer())[0] == 200
        again = await Client.to(port, ASK)  # the kept-alive ones are young, and there is no room
        assert (await again.answer())[0] == 503
        for client in (refused, again, *working):
            client.close()


async def test_a_crowd_beyond_those_that_are_told_is_closed_at_once(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "_MAX_REFUSED", 2)
    monkeypatch.setattr(http_connection, "_REFUSAL_S", 60.0)
    monkeypatch.setattr(http_connection, "_SETTLING_S", 60.0)
    async with serving(app, HttpLimits(max_connections=1)) as port:
        crowd = [await Client.to(port) for _ in range(10)]

        def num_closed() -> int:
            return sum([client.reader.at_eof() or client.reader.exception() is not None for client in crowd])

        await until(lambda: num_closed() >= 7)
        await asyncio.sleep(0.1)
        assert num_closed() == 7
        for client in crowd:
            client.close()


async def test_what_is_no_http_is_answered_in_the_applications_shape(app: App) -> None:
    def answer(error: LoraplexError) -> HttpAnswer:
        return 400, [(b"content-type", b"application/json")], json.dumps({"error": error.message}).encode()

    async with serving(app, HttpLimits(), answer) as port:
        for garbage in (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"):
            client = await Client.to(port, garbage)
            status, headers, body = await client.answer()
            assert (status, headers["content-type"]) == (400, "application/json")
            assert "error" in json.loads(body)
            assert await client.rest() == b""
            client.close()


async def test_a_broken_body_tells_the_application(app: App) -> None:
    async with serving(app, HttpLimits()) as port:
        client = await Client.to(port, b"POST / HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n")
        await asyncio.sleep(0.05)
        client.writer.write(b"no number\r\n")
        assert (await client.answer())[0] == 400
        assert app.left.is_set()
        client.close()


def test_the_limit_on_files_is_raised_as_far_as_may_be() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lower = min(soft, 900)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lower, hard))
        raised = raise_file_limit()
        assert raised == min(hard, 65_536)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (raised, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
