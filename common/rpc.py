"""gRPC the way every Loraplex service speaks it: servers, channels, and the one place where errors become statuses.

Knows nothing of any service. A handler raises a `LoraplexError`; the interceptor sends it as a `google.rpc.Status`.
Anything else a handler raises is logged with its traceback and answered as an opaque INTERNAL.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, Final

import grpc
import structlog
from google.protobuf.descriptor import ServiceDescriptor
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from common.rpc_limits import OpenCalls, RpcLimits
from common.trace_rpc import TraceInterceptor
from loraplex.calls import CHANNEL_OPTIONS, MAX_MESSAGE_BYTES
from loraplex.errors import FailedPrecondition, LoraplexError, to_status

log = structlog.get_logger(__name__)

MAX_METADATA_BYTES: Final = 64 * 2**10
_LAST_STATUS_S: Final = 0.1  # for writing the last status to a health watcher

_SERVER_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),  # a port that is taken must fail, not be shared silently
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
_CHANNEL_OPTIONS: Final = (
    *CHANNEL_OPTIONS,
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),  # one connection per channel: a dead one says nothing about another
)


def open_channel(address: str, options: Sequence[tuple[str, Any]] = ()) -> aio.Channel:
    """Return an insecure aio channel to `host:port` with the project's limits and back-off; `options` come on top."""
    return aio.insecure_channel(address, options=[*_CHANNEL_OPTIONS, *options])


def _status_of(error: Exception, method: str) -> Any:
    if isinstance(error, LoraplexError):
        return rpc_status.to_status(to_status(error))
    log.error("rpc.unexpected", method=method, exc_info=error)
    return rpc_status.to_status(to_status(LoraplexError("internal error; the server's log has the details")))


class ErrorInterceptor(aio.ServerInterceptor):
    """Turns what handlers raise into statuses, and refuses calls beyond those that may be open at a time."""

    def __init__(self, calls: OpenCalls) -> None:
        self._calls = calls

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wrap the handler of the call, whatever its kind."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None  # gRPC answers UNIMPLEMENTED
        method = str(handler_call_details.method)
        if handler.response_streaming:
            inner_stream = handler.unary_stream or handler.stream_stream

            async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
                try:
                    self._calls.begin(method, context)
                    async for response in inner_stream(request, context):
                        yield response
                except (aio.AbortError, asyncio.CancelledError):
                    raise
                except Exception as error:  # noqa: BLE001 - the last line of defence
                    await context.abort_with_status(_status_of(error, method))

            async def written(request: Any, context: Any) -> None:  # handlers that write themselves, as health's Watch
                try:
                    self._calls.begin(method, context)
                    await inner_stream(request, context)
                except (aio.AbortError, asyncio.CancelledError):
                    raise
                except Exception as error:  # noqa: BLE001 - the last line of defence
                    await context.abort_with_status(_status_of(error, method))

            wrapped = written if inspect.iscoroutinefunction(inner_stream) else stream
            make = (
                grpc.stream_stream_rpc_method_handler if handler.stream_stream else grpc.unary_stream_rpc_method_handler
            )
            return make(wrapped, handler.request_deserializer, handler.response_serializer)
        inner_unary = handler.unary_unary or handler.stream_unary

        async def unary(request: Any, context: Any) -> Any:
            try:
                self._calls.begin(method, context)
                return await inner_unary(request, context)
            except (aio.AbortError, asyncio.CancelledError):
                raise
            except Exception as error:  # noqa: BLE001 - the last line of defence
                await context.abort_with_status(_status_of(error, method))

        make_unary = (
            grpc.stream_unary_rpc_method_handler if handler.stream_unary else grpc.unary_unary_rpc_method_handler
        )
        return make_unary(unary, handler.request_deserializer, handler.response_serializer)


class _Health(health.aio.HealthServicer):  # type: ignore[misc]  # grpc_health has no types
    """Health whose Watch streams end when the server stops; an open one would hold the stop for its whole grace."""

    def __init__(self) -> None:
        super().__init__()
        self._stopped = asyncio.Event()

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:  # noqa: N802 - gRPC's name
        """Stream the status until the client leaves or the server stops."""
        watch = asyncio.ensure_future(super().Watch(request, context))
        stopped = asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait({watch, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not watch.done():
                await asyncio.wait({watch}, timeout=_LAST_STATUS_S)
            if watch.done():
                watch.result()
        finally:
            watch.cancel()
            stopped.cancel()

    async def stop(self) -> None:
        """Tell every watcher NOT_SERVING and end its stream."""
        await self.enter_graceful_shutdown()
        self._stopped.set()


class Server:
    """A gRPC server with error mapping, health and reflection. `guards` may refuse calls (see common.bearer).

    Health starts as NOT_SERVING for every service and as a whole (""); `set_serving` changes all at once.
    """

    def __init__(
        self,
        register: Iterable[Callable[[aio.Server], None]],
        services: Sequence[ServiceDescriptor],
        guards: Sequence[aio.ServerInterceptor] = (),
        *,
        outer: Sequence[aio.ServerInterceptor] = (),
        limits: RpcLimits | None = None,
    ) -> None:
        """`outer` interceptors are around the error mapping, the first outermost; `guards` are inside it."""
        limits = limits or RpcLimits()
        errors = ErrorInterceptor(OpenCalls(limits.max_calls))
        self._server = aio.server(
            interceptors=[*outer, errors, TraceInterceptor(), *guards], options=[*_SERVER_OPTIONS, *limits.options()]
        )
        self._names = ["", *(service.full_name for service in services)]
        for add in register:
            add(self._server)
        self._health = _Health()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            [*self._names[1:], health.SERVICE_NAME, reflection.SERVICE_NAME], self._server
        )

    async def start(self, host: str, port: int) -> int:
        """Bind and serve; port 0 takes a free one. Returns the port. Raises FailedPrecondition when it is taken."""
        try:
            bound = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise FailedPrecondition(
                f"cannot listen on {host}:{port}: the port is taken or the address is not ours; "
                "stop the other process or choose another port",
                field="port",
            ) from error
        await self.set_serving(serving=False)
        await self._server.start()
        return bound

    async def set_serving(self, *, serving: bool) -> None:
        """Tell health checkers whether the service takes requests."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones `grace_s`, then cut them."""
        await self._health.stop()
        await self._server.stop(grace_s)
