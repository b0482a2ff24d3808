"""Counts and times every RPC of a server, and counts those that serve a caller into its `Activity`.

The outermost interceptor, so that what the others refuse is counted too. An RPC ends when gRPC says so, which is also
where a handler is still suspended in a write to a client that has left.
"""

from __future__ import annotations

import inspect
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import grpc
import prometheus_client
from grpc import aio
from prometheus_client import CollectorRegistry, Gauge, Histogram

from common import deadline
from common.activity import Activity

_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_STANDING_SERVICES: Final = ("/grpc.health.", "/grpc.reflection.")


def is_standing(method: str) -> bool:
    """Tell whether an RPC (its full method) is watched for as long as its client lives, or asks about the server."""
    return method.startswith(_STANDING_SERVICES) or method.rpartition("/")[2].startswith("Watch")


class CallMetrics:
    """The RPC metrics of one server. Methods are those it serves; any other is "unknown"."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._calls = prometheus_client.Counter(
            "loraplex_rpc_requests", "RPCs ended, by method and status code", ("method", "code"), registry=registry
        )
        self._seconds = Histogram(
            "loraplex_rpc_seconds",
            "Time of an RPC, streams to their end",
            ("method",),
            buckets=_SECONDS,
            registry=registry,
        )
        self._open = Gauge("loraplex_rpc_open", "RPCs in progress", ("method",), registry=registry)
        self._num_open: Counter[str] = Counter()

    def num_open(self, method: str) -> int:
        """Return how many calls of a method (its full name) are in progress."""
        return self._num_open[method]

    def unknown(self) -> None:
        """Count a call of a method that does not exist."""
        self._calls.labels("unknown", grpc.StatusCode.UNIMPLEMENTED.name).inc()

    def begin(self, method: str) -> None:
        """Count a call in."""
        self._num_open[method] += 1
        self._open.labels(method).set(self._num_open[method])

    def end(self, method: str, code: grpc.StatusCode, seconds: float) -> None:
        """Count a call out."""
        self._num_open[method] -= 1
        self._open.labels(method).set(self._num_open[method])
        self._calls.labels(method, code.name).inc()
        self._seconds.labels(method).observe(seconds)


class CallInterceptor(aio.ServerInterceptor):
    """See the module."""

    def __init__(self, metrics: CallMetrics, activity: Activity) -> None:
        self._metrics = metrics
        self._activity = activity

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wrap the handler of the call, whatever its kind."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            self._metrics.unknown()
            return None  # gRPC answers UNIMPLEMENTED
        method = str(handler_call_details.method)
        if handler.response_streaming:
            inner_stream = handler.unary_stream or handler.stream_stream

            async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
                self._begin(method, context)
                async for response in inner_stream(request, context):
                    yield response

            async def written(request: Any, context: Any) -> None:  # handlers that write themselves, as health's Watch
                self._begin(method, context)
                await inner_stream(request, context)

            wrapped = written if inspect.iscoroutinefunction(inner_stream) else stream
            make = (
                grpc.stream_stream_rpc_method_handler if handler.stream_stream else grpc.unary_stream_rpc_method_handler
            )
            return make(wrapped, handler.request_deserializer, handler.response_serializer)
        inner_unary = handler.unary_unary or handler.stream_unary

        async def unary(request: Any, context: Any) -> Any:
            self._begin(method, context)
            return await inner_unary(request, context)

        make_unary = (
            grpc.stream_unary_rpc_method_handler if handler.stream_unary else grpc.unary_unary_rpc_method_handler
        )
        return make_unary(unary, handler.request_deserializer, handler.response_serializer)

    def _begin(self, method: str, context: Any) -> None:
        begin_s = time.perf_counter()
        standing = is_standing(method)
        self._metrics.begin(method)
        if not standing:
            self._activity.begin()

        def end(ended: Any) -> None:
            self._metrics.end(method, _code_of(ended), time.perf_counter() - begin_s)
            if not standing:
                self._activity.end()

        context.add_done_callback(end)


def _code_of(context: Any) -> grpc.StatusCode:
    """Return how a call ended. One that was cut short has no code of its own."""
    code = context.code()
    if isinstance(code, grpc.StatusCode):
        return code
    if context.done():
        return grpc.StatusCode.OK
    return grpc.StatusCode.DEADLINE_EXCEEDED if deadline.is_past(context) else grpc.StatusCode.CANCELLED
