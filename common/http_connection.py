"""One HTTP connection within limits: a client that sends too slowly, or nothing at all, costs others nothing.

uvicorn's own protocol waits for ever for the rest of a head or a body, and takes as many connections as there are
files. Here every state in which a connection waits for its client has a deadline, and where all places are taken a
connection that waits for its client gives way to a new one. Knows nothing of what is served.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

import h11
import structlog
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from loraplex.errors import InvalidRequest, LoraplexError, RequestTimeout, Unavailable

log = structlog.get_logger(__name__)

HttpAnswer = tuple[int, list[tuple[bytes, bytes]], bytes]
"""Status, headers without a length, body."""

_APP_FIRST_S: Final = 2.0
"""An application that reads a body has the deadline itself, and answers; the connection waits this much longer."""
_LINGER_S: Final = 5.0
"""What the rest of a body gets that was answered before it came; closing at once could take the answer with it."""
_FLUSH_S: Final = 10.0
"""What a client gets to take the last bytes of a connection that is closing."""
_REFUSAL_S: Final = 5.0
"""What a client that is one too many gets to send its request, so that it can be told."""
_SETTLING_S: Final = 0.25
"""A connection younger than this is no idle one yet: it does not give way."""
_MAX_REFUSED: Final = 128
"""Connections over the limit that are told why; more are closed at once."""
_WARN_EVERY_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What clients of an HTTP port may take."""

    read_timeout_s: float = 30.0
    """For the head of a request, and again for its body."""
    max_connections: int = 4096


class _Phase(Enum):
    """What a connection waits for."""

    OPENED = auto()  # the first byte
    IDLE = auto()  # the next request's first byte
    HEAD = auto()
    BODY = auto()
    LINGER = auto()  # the rest of a body, after the answer
    ANSWERING = auto()  # the application: not our business
    CLOSING = auto()  # the client to take what was sent


_WAITS: Final = frozenset({_Phase.OPENED, _Phase.IDLE, _Phase.HEAD, _Phase.BODY, _Phase.LINGER})


class Gate:
    """Counts the connections of one server; decides who gets in and who gives way."""

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._waiting: dict[Connection, float] = {}  # since when, oldest first
        self._warned_s = -_WARN_EVERY_S

    def admits(self, num_open: int, now_s: float) -> bool:
        """Tell whether a connection that has just been opened, and is counted in `num_open`, is served.

        Where it is one too many, the one that has waited longest for its client is closed in its stead.
        """
        if num_open <= self._max_connections:
            return True
        if now_s - self._warned_s >= _WARN_EVERY_S:
            self._warned_s = now_s
            log.warning("http.connections_full", limit=self._max_connections, what_now="idle ones are closed for new")
        oldest, since_s = next(iter(self._waiting.items()), (None, now_s))
        if oldest is None or now_s - since_s < _SETTLING_S:
            return False
        del self._waiting[oldest]
        oldest.give_way()
        return True

    def tells(self, num_open: int) -> bool:
        """Tell whether a connection that is not served gets to hear why."""
        return num_open <= self._max_connections + _MAX_REFUSED

    def waits(self, connection: Connection, now_s: float) -> None:
        """Note that from now on a connection waits for its client."""
        self._waiting[connection] = now_s

    def works(self, connection: Connection) -> None:
        """Note that it does not any more, or is gone."""
        self._waiting.pop(connection, None)


class HttpConfig(uvicorn.Config):
    """uvicorn's configuration, and what a connection needs besides."""

    def __init__(
        self, app: ASGIApp, limits: HttpLimits, answer: Callable[[LoraplexError], HttpAnswer], **options: Any
    ) -> None:
        super().__init__(app, http=Connection, **options)
        self.limits = limits
        self.answer = answer
        self.gate = Gate(limits.max_connections)


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1 with deadlines."""

    def __init__(self, config: uvicorn.Config, *arguments: Any, **options: Any) -> None:
        assert isinstance(config, HttpConfig)  # noqa: S101 - made by it alone
        super().__init__(config, *arguments, **options)
        self._limits = config.limits
        self._answer = config.answer
        self._gate = config.gate
        self._phase = _Phase.ANSWERING
        self._timer: asyncio.TimerHandle | None = None
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's
        """Begin to wait for a request, where there is room."""
        super().connection_made(transport)
        if not self._gate.admits(len(self.connections), self.loop.time()):
            if not self._gate.tells(len(self.connections)):
                transport.abort()
                return
            self._is_refused = True
            self.app = self._refuse
        self._follow()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the client."""
        self._gate.works(self)
        self._stop_timer()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        """Take bytes in."""
        super().data_received(data)
        self._follow()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        super().on_response_complete()
        self._follow()

    def shutdown(self) -> None:
        """Close as soon as the running request is answered."""
        super().shutdown()
        self._follow()

    def give_way(self) -> None:
        """End at once, for a connection that has something to ask."""
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP."""
        self._answer_and_close(InvalidRequest(msg))

    def _follow(self) -> None:
        """Give the state the connection is in its deadline, if it is a new one."""
        phase = self._find_phase()
        if phase is self._phase:
            return
        self._phase = phase
        self._stop_timer()
        self._gate.works(self)
        if phase is _Phase.ANSWERING:
            return
        if phase in _WAITS and not self._is_refused:
            self._gate.waits(self, self.loop.time())
        self._timer = self.loop.call_later(self._patience_s(phase), self._too_late)

    def _find_phase(self) -> _Phase:
        if self.transport.is_closing():
            return _Phase.CLOSING
        theirs = self.conn.their_state
        if theirs is h11.SEND_BODY:
            return _Phase.LINGER if self.conn.our_state is h11.DONE else _Phase.BODY
        if theirs is not h11.IDLE:
            return _Phase.ANSWERING
        if self.conn.trailing_data[0]:
            return _Phase.HEAD
        return _Phase.OPENED if self.cycle is None else _Phase.IDLE

    def _patience_s(self, phase: _Phase) -> float:
        if phase is _Phase.CLOSING:
            return _FLUSH_S
        if phase is _Phase.LINGER:
            return _LINGER_S
        if phase is _Phase.IDLE:
            return float(self.timeout_keep_alive)
        if self._is_refused:
            return min(_REFUSAL_S, self._limits.read_timeout_s)
        return self._limits.read_timeout_s + (_APP_FIRST_S if phase is _Phase.BODY else 0.0)

    def _too_late(self) -> None:
        if self._phase is _Phase.HEAD:
            self._answer_and_close(
                RequestTimeout(f"the request's head did not come within {self._limits.read_timeout_s:g} s")
            )
        elif self._phase in (_Phase.BODY, _Phase.CLOSING):
            self.transport.abort()
        else:
            self.transport.close()
        self._follow()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _answer_and_close(self, error: LoraplexError) -> None:
        """Answer in the application's stead, where no answer has begun, and close."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # the application hears that there is nobody to answer
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            status, headers, body = self._answer(error)
            headers = [*headers, (b"content-length", str(len(body)).encode()), (b"connection", b"close")]
            for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, as an application, that there are too many connections."""
        del scope, receive
        error = Unavailable("the server has no room for another connection; try again", retry_after_s=1.0)
        status, headers, body = self._answer(error)
        headers = [*headers, (b"content-length", str(len(body)).encode()), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
