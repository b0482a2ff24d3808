"""What a router tells workers of adapters unasked, and when it may tell it again. Pure bookkeeping, no clock."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from common.backoff import Backoff
from router.catalog import Version

AGAIN: Final = Backoff(first_s=1.0, longest_s=60.0)
"""Between two orders of the same words: two routers that disagree undo each other's work once a minute, not always."""

_FORGET_S: Final = 600.0


class OrderKind(enum.Enum):
    """What a worker is told."""

    PIN = "pin"
    UNPIN = "unpin"
    TO_DISK = "to_disk"
    TO_DEVICE = "to_device"
    FOR_REQUEST = "for_request"
    """To the device, for a request that was refused as it could not wait."""


@dataclass(frozen=True, slots=True)
class Order:
    """One thing to tell the worker at `address`; `epoch` is the one it was decided for."""

    kind: OrderKind
    address: str
    worker_id: str
    epoch: str
    base_digest: str
    version: Version

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What makes two orders the same."""
        return self.kind.value, self.worker_id, self.epoch, self.version.artifact_digest


@dataclass(slots=True)
class _Sent:
    attempts: int
    last_s: float


class Deliveries:
    """Chooses which orders are sent now: none that is in flight, none too soon after the last of the same words.

    An order that is decided again has not worked, or somebody else undoes it: pauses double from a second to a minute.
    Times are seconds of any clock.
    """

    def __init__(self, *, at_a_time: int = 16, per_worker: int = 4) -> None:
        self._at_a_time = at_a_time
        self._per_worker = per_worker
        self._sent: dict[tuple[str, str, str, str], _Sent] = {}
        self._in_flight: dict[tuple[str, str, str, str], str] = {}

    @property
    def in_flight(self) -> int:
        """Orders that no worker has answered yet."""
        return len(self._in_flight)

    def begin(self, orders: Iterable[Order], now_s: float) -> tuple[list[Order], float | None]:
        """Take the orders to be sent now, first ones first; return them, and when to ask again for the others.

        None: nothing is left that time alone would make due. Each that is returned is in flight until `end`.
        """
        due: list[Order] = []
        again_s: float | None = None
        for order in orders:
            if order.key in self._in_flight:
                continue
            sent = self._sent.get(order.key)
            if sent is not None and (next_s := sent.last_s + AGAIN.pause_s(sent.attempts)) > now_s:
                again_s = next_s if again_s is None else min(again_s, next_s)
                continue
            workers = list(self._in_flight.values())
            if len(workers) >= self._at_a_time or workers.count(order.worker_id) >= self._per_worker:
                continue  # the end of one in flight is when to ask again
            self._in_flight[order.key] = order.worker_id
            self._sent[order.key] = _Sent(sent.attempts + 1 if sent else 1, now_s)
            due.append(order)
        return due, again_s

    def end(self, order: Order, now_s: float) -> None:
        """Note that the worker has answered, or that it will not."""
        self._in_flight.pop(order.key, None)
        if (sent := self._sent.get(order.key)) is not None:
            sent.last_s = now_s
        for key in [key for key, sent in self._sent.items() if sent.last_s < now_s - _FORGET_S]:
            del self._sent[key]
