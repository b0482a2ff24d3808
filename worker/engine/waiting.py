"""The requests that wait, behind the small interface that a fair order between tenants will implement too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from worker.engine.request import Request


class WaitingQueue(Protocol):
    """Requests that hold nothing yet, in the order in which they shall be admitted."""

    def add(self, request: Request) -> None:
        """Put a request in."""
        ...

    def remove(self, request_id: int) -> Request | None:
        """Take a request out, because it was admitted, aborted or failed; None if it is not here."""
        ...

    def in_order(self) -> Iterator[Request]:
        """Iterate in the order of admission; the queue must not change meanwhile."""
        ...

    def __len__(self) -> int: ...

    def __contains__(self, request_id: int) -> bool: ...


class ArrivalQueue:
    """First come, first served."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}

    def add(self, request: Request) -> None:
        """Put a request at the end."""
        self._requests[request.request_id] = request

    def remove(self, request_id: int) -> Request | None:
        """Take a request out; None if it is not here."""
        return self._requests.pop(request_id, None)

    def in_order(self) -> Iterator[Request]:
        """Iterate in the order of arrival."""
        return iter(self._requests.values())

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._requests
