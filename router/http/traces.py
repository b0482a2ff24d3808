"""The server span of an HTTP request."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from starlette.types import Message, Scope, Send

from common import tracing
from router.http.wire import header

_CONTEXT_KEYS = ("traceparent", "tracestate")  # the spans themselves go to gRPC callers alone


class HttpTrace:
    """A server span around one request; what leaves the block, or was told before, is how it ended.

    `send` stands for the one that was given, and notes the status.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        path = str(scope["path"])
        self.operation = "chat" if path.endswith("/chat/completions") else "text_completion"
        carrier = {key: value for key in _CONTEXT_KEYS if (value := header(scope, key)) is not None}
        method = str(scope["method"])
        self._span = tracing.begin_request(
            f"{method} {path}", carrier, {"http.request.method": method, "http.route": path, "url.path": path}
        )
        self._send = send
        self.send: Send = self._noting if self._span.is_recording() else send

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.failed(error)
        self._span.end()

    def failed(self, error: BaseException) -> None:
        """Note that the request ended with an error."""
        tracing.mark(self._span, error)

    async def _noting(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._span.set_attribute("http.response.status_code", message["status"])
        await self._send(message)
