"""What callers may take of a gRPC port: connections, and calls that are open at a time.

Connections over their limit are closed by gRPC itself, before anything is read: their callers see UNAVAILABLE, others
notice nothing. A call over its limit is answered with a typed refusal, which names the setting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from common.file_limit import room_for_connections
from loraplex.errors import QueueFull

_PROBE: Final = "/grpc.health.v1.Health/Check"
"""A service that is busy is not ill: its probes are answered whatever else is open."""
_RETRY_AFTER_S: Final = 1.0
_IDLE_S: Final = 600.0
"""A connection without calls gives its place back after this long; its client connects again when it calls."""
_HANDSHAKE_S: Final = 20.0
"""A connection that has not said that it speaks HTTP/2 by then is closed."""


@dataclass(frozen=True, slots=True)
class RpcLimits:
    """What callers of a gRPC port may take, all together."""

    max_connections: int = 4096
    max_calls: int = 16_384

    def options(self) -> tuple[tuple[str, int], ...]:
        """Return gRPC's server options, within the process's limit on open files."""
        room = room_for_connections(self.max_connections, "--max-grpc-connections")
        return (
            ("grpc.max_allowed_incoming_connections", room),
            ("grpc.max_connection_idle_ms", int(_IDLE_S * 1e3)),
            ("grpc.server_handshake_timeout_ms", int(_HANDSHAKE_S * 1e3)),
        )


class OpenCalls:
    """Counts the open calls of one server; single-threaded, on its event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_open = 0

    def begin(self, method: str, context: Any) -> None:
        """Count a call in, and out again when gRPC says that it has ended. Raises QueueFull where it is one too many.

        Checks of health do not count.
        """
        if method == _PROBE:
            return
        if self._num_open >= self._limit:
            raise QueueFull(
                f"{self._limit} calls are open here, which is all that --max-grpc-calls allows; try again later",
                limit=self._limit,
                retry_after_s=_RETRY_AFTER_S,
            )
        self._num_open += 1
        context.add_done_callback(self._end)

    def _end(self, _: Any) -> None:
        self._num_open -= 1
