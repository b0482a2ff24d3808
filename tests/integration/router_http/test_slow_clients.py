"""Slow, idle and half-gone HTTP clients of a router: told why where they can be, and in nobody's way."""

from __future__ import annotations

import asyncio
import json
import socket

import httpx2

from tests.integration.router_fakes import (
    FakeRegistry,
    FakeWorker,
    eventually,
    never_answer,
    running_router,
)

BODY = json.dumps({"model": "sql", "messages": [{"role": "user", "content": "Hi"}]}).encode()
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: test\r\ncontent-length: %d\r\n\r\n" % len(BODY)


async def answer_to(port: int, first: bytes) -> tuple[int, dict[str, object]]:
    """Send what is not a whole request, and return the status and the error that come back before the end."""
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(first)  # before the router, on this same loop, can begin to wait for it
    reader, writer = await asyncio.open_connection(sock=connection)
    async with asyncio.timeout(30):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), json.loads(body)["error"]


async def test_a_request_that_does_not_come_is_408_in_openais_shape(registry: FakeRegistry, worker: FakeWorker) -> None:
    async with running_router(registry.address, worker.address, http_read_timeout_s=0.3) as router:
        for part in (HEAD[:30], HEAD.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n") + BODY[:-1]):
            status, error = await answer_to(router.router.http_port, part)
            assert (status, error["code"], error["type"]) == (408, "request_timeout", "invalid_request_error")
        status, error = await answer_to(router.router.http_port, b"\x00\x01 garbage\r\n\r\n")
        assert (status, error["type"]) == (400, "invalid_request_error")
        assert worker.requests == []


async def test_a_thousand_idle_clients_keep_nobody_out(registry: FakeRegistry, worker: FakeWorker) -> None:
    async with running_router(registry.address, worker.address, max_http_connections=200) as router:
        crowd: list[asyncio.StreamWriter] = []
        try:
            for number in range(1000):
                _, writer = await asyncio.open_connection("127.0.0.1", router.router.http_port)
                writer.write((b"", HEAD[:40], HEAD + BODY[:5])[number % 3])
                crowd.append(writer)
            await asyncio.sleep(0.3)  # until those that came in one rush are no newcomers
            async with httpx2.AsyncClient(timeout=30) as client:
                for _ in range(20):
                    answer = await client.post(
                        f"{router.url}/v1/chat/completions", content=BODY, headers={"connection": "close"}
                    )
                    assert answer.status_code == 200
        finally:
            for writer in crowd:
                writer.transport.abort()


async def test_closing_the_write_side_is_leaving(registry: FakeRegistry, worker: FakeWorker) -> None:
    worker.script = never_answer
    async with running_router(registry.address, worker.address) as router:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.router.http_port)
        writer.write(HEAD + BODY)
        await eventually(lambda: len(worker.requests) == 1)
        assert worker.num_cancelled == 0
        writer.write_eof()
        await eventually(lambda: worker.num_cancelled == 1)
        async with asyncio.timeout(30):
            assert await reader.read() == b""
        writer.close()
