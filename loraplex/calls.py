"""What the synchronous and the asynchronous client share: addresses, channel options, deadlines, error translation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, cast

import grpc

from loraplex.errors import (
    DeadlineExceeded,
    LoraplexError,
    RegistryUnavailable,
    Unavailable,
    carries_details,
    from_rpc_error,
)

DEFAULT_ROUTER: Final = "127.0.0.1:50050"
DEFAULT_REGISTRY: Final = "127.0.0.1:50051"
PAGE_SIZE: Final = 500

MAX_MESSAGE_BYTES: Final = 16 * 2**20
CHANNEL_OPTIONS: Final[tuple[tuple[str, Any], ...]] = (
    ("grpc.enable_retries", 0),  # the router decides what may be tried again
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # what one attempt gets at least; a refused one ends at once
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


class Page(Protocol):
    """A response of a list method; an empty token ends the list."""

    next_page_token: str


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Deadlines in seconds. The call's deadline travels with it: a server gives up when its caller does."""

    call_s: float = 15.0
    upload_s: float = 600.0
    generate_s: float = 600.0
    evaluate_s: float = 1800.0
    load_s: float = 120.0
    import_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class Peer:
    """A service and where it is."""

    service: Literal["router", "registry"]
    address: str

    @contextmanager
    def calls(self) -> Iterator[None]:
        """Raise the typed error of a call to this peer that fails in the block."""
        try:
            yield
        except grpc.RpcError as error:
            raise self.error(error) from error

    def error(self, error: grpc.RpcError) -> LoraplexError:
        """Return the typed error behind a failed call; what gRPC itself says is put into words that name the peer."""
        typed = from_rpc_error(error)
        call = cast("Any", error)
        if carries_details(error):
            return typed  # the service's own words
        code: grpc.StatusCode = call.code()
        if code is grpc.StatusCode.UNAVAILABLE:
            cls = RegistryUnavailable if self.service == "registry" else Unavailable
            return cls(
                f"the {self.service} at {self.address} cannot be reached ({_brief(call.details())})",
                service=self.service,
                address=self.address,
            )
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(
                f"the deadline passed before the {self.service} at {self.address} had finished",
                service=self.service,
                address=self.address,
            )
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return LoraplexError(
                f"what answers at {self.address} is not a Loraplex {self.service}, or one of another version",
                service=self.service,
                address=self.address,
            )
        return typed


def _brief(details: str | None) -> str:
    """Cut gRPC's nested connection message to its last cause."""
    text = (details or "no details").strip()
    for marker in (
        "Connection refused",
        "Connection reset",
        "Socket closed",
        "DNS resolution failed",
        "No route to host",
    ):
        if marker.lower() in text.lower():
            return marker.lower()
    return text if len(text) <= 160 else f"{text[:157]}..."
