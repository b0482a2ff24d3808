"""Server spans of gRPC calls: an interceptor that stands inside the one that makes statuses of errors.

It sees the exceptions of handlers themselves, so it knows reasons and not only codes, and it hears of the end of every
call, also of one whose handler hangs in a write when its client goes.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import grpc
from grpc import aio
from opentelemetry.trace import Span

from common import deadline, tracing
from loraplex.errors import DeadlineExceeded, LoraplexError

STATUS_KEY: Final = "rpc.response.status_code"


def is_traced(method: str) -> bool:
    """Tell whether calls of a method (`/package.Service/Name`) are requests; watches and probes are not."""
    service, _, name = method.lstrip("/").partition("/")
    return not service.startswith("grpc.") and not name.startswith("Watch")


class _Call:
    """One call's span, ended once."""

    def __init__(self, method: str, context: Any) -> None:
        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        name = method.lstrip("/")
        self._context = context
        self._open = True
        self._span: Span = tracing.begin_request(name, metadata, {"rpc.system.name": "grpc", "rpc.method": name})
        if self._span.is_recording():
            context.add_done_callback(self._done)

    def end(self, error: BaseException | None = None) -> None:
        """Note the end, and the exception that was it."""
        if not self._open:
            return
        self._open = False
        if isinstance(error, asyncio.CancelledError | GeneratorExit) and deadline.is_past(self._context):
            error = DeadlineExceeded("the deadline passed")  # gRPC cancels the handler then
        if error is None:
            code = grpc.StatusCode.OK
        elif isinstance(error, asyncio.CancelledError | GeneratorExit):
            code = grpc.StatusCode.CANCELLED
        else:
            code = error.code if isinstance(error, LoraplexError) else grpc.StatusCode.INTERNAL
        if error is not None:
            tracing.mark(self._span, error)
        self._span.set_attribute(STATUS_KEY, code.name)
        self._span.end()

    def _done(self, _: object) -> None:
        self.end(asyncio.CancelledError())  # a handler that came to its end has said so before


class TraceInterceptor(aio.ServerInterceptor):
    """Makes a span of every request."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wrap the handler of the call, whatever its kind."""
        handler: Any = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or not is_traced(method):
            return handler  # type: ignore[no-any-return]
        if handler.response_streaming:
            inner_stream = handler.unary_stream or handler.stream_stream
            if inspect.iscoroutinefunction(inner_stream):
                return handler  # type: ignore[no-any-return] # writes itself; none of ours does

            async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
                call = _Call(method, context)
                try:
                    async for response in inner_stream(request, context):
                        yield response
                except BaseException as error:
                    call.end(error)
                    raise
                call.end()

            make = (
                grpc.stream_stream_rpc_method_handler if handler.stream_stream else grpc.unary_stream_rpc_method_handler
            )
            return make(stream, handler.request_deserializer, handler.response_serializer)
        inner_unary = handler.unary_unary or handler.stream_unary

        async def unary(request: Any, context: Any) -> Any:
            call = _Call(method, context)
            try:
                response = await inner_unary(request, context)
            except BaseException as error:
                call.end(error)
                raise
            call.end()
            return response

        make_unary = (
            grpc.stream_unary_rpc_method_handler if handler.stream_unary else grpc.unary_unary_rpc_method_handler
        )
        return make_unary(unary, handler.request_deserializer, handler.response_serializer)
