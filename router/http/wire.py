"""The ASGI side of a request: reading a body within limits, sending an answer, noticing that the client has gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Final

from starlette.types import Receive, Scope, Send

from loraplex.errors import Cancelled, InvalidRequest, RequestTimeout, TooLarge

_DISCARD_BYTES: Final = 64 * 2**20
"""How much of an over-long body is read and dropped, so that the client gets to see the answer."""
_GONE: Final = "the client closed the connection"


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """What the body of a request may take."""

    max_bytes: int
    timeout_s: float


class ClientGone(Cancelled):
    """The client closed the connection; nobody reads an answer any more."""


def header(scope: Scope, name: str) -> str | None:
    """Return a request header by its lower-case name, the first where there are several."""
    wanted = name.encode()
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == wanted), None)


async def read_body(receive: Receive, limits: BodyLimits) -> bytes:
    """Read the whole body. Raises TooLarge, RequestTimeout and ClientGone."""
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone(_GONE)
                part: bytes = message.get("body", b"")
                size += len(part)
                if size <= limits.max_bytes:
                    parts.append(part)
                if size > _DISCARD_BYTES + limits.max_bytes or not message.get("more_body", False):
                    break
    except TimeoutError:
        raise RequestTimeout(f"the request's body did not come within {limits.timeout_s:g} s") from None
    if size > limits.max_bytes:
        raise TooLarge(f"the request's body is larger than {limits.max_bytes} bytes", limit=limits.max_bytes)
    return b"".join(parts)


def parse_json(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body. Raises InvalidRequest."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        why = str(error) if isinstance(error, json.JSONDecodeError) else "it is not UTF-8, or too deep or too large"
        raise InvalidRequest(f"the request's body is not JSON: {why}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"the request's body must be a JSON object, not {type(value).__name__}")
    return value


async def send_answer(send: Send, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> None:
    """Send a whole answer."""
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [*headers, (b"content-length", str(len(body)).encode())],
        }
    )
    await send({"type": "http.response.body", "body": body})


async def until_client_leaves(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do `work`; when the client disconnects, cancel it at once and raise ClientGone."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_client_leaves(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone(_GONE)
        working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait({working, leaving})
        for task in (working, leaving):
            if not task.cancelled():
                task.exception()  # raised above, or nobody is left to tell


async def _client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
