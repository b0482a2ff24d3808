"""What is wanted of adapters without a request: loads, unloads, pins; and when it is done. Pure: time is an argument.

Loads go behind all that waiting requests need, by urgency and then in the order in which they came. An adapter that is
used or pinned is not unloaded; one whose last step is still in flight leaves when that is answered. Pins are refused
where they would not leave room for every request that the worker takes, so nobody ever waits for a pin to end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Final

from worker.engine import refusal
from worker.engine.config import EngineConfig
from worker.engine.memory import Memory
from worker.engine.refusal import Problem
from worker.engine.request import Request
from worker.engine.residency import Placement
from worker.mailbox import Failure, Load, Pin, Steered, Unload, Urgency

NOBODY: Final = ""
"""Tenant of loads that no request asked for: nobody is charged for them."""


@dataclass(frozen=True, slots=True)
class _Claim:
    """Who a load is for; see `Claimant`."""

    request_id: int
    tenant: str = NOBODY


class Orders:
    """The orders of one engine that are not done."""

    def __init__(self, memory: Memory, config: EngineConfig) -> None:
        self._memory, self._config = memory, config
        self._loads: dict[int, Load] = {}
        self._unloads: dict[int, bool] = {}  # id -> was on the device
        self._done: list[Steered] = []
        self._failures: list[Failure] = []

    def __len__(self) -> int:
        """Return how many loads are not done."""
        return len(self._loads)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._loads or request_id in self._unloads

    def take_done(self) -> tuple[list[Steered], list[Failure]]:
        """Return what was done and what failed since the last call."""
        for order_id in self._memory.take_unloaded():
            self._done.append(Steered(order_id, self._unloads.pop(order_id)))
        done, self._done = self._done, []
        failures, self._failures = self._failures, []
        return done, failures

    # What comes.

    def load(self, order: Load) -> None:
        """Want an adapter on the device."""
        slot = self._memory.residency.find(order.adapter.artifact_digest)
        pinned = refusal.pinned_room(self._memory.residency.pinned, self._config, order.adapter.artifact_digest)
        problem = refusal.adapter_too_large(order.adapter, self._config, pinned)
        if slot is not None and not slot.loading:
            self._done.append(Steered(order.request_id, was_on_device=True))
        elif problem is not None:
            self._failures.append(Failure(order.request_id, *problem))
        else:
            self._loads[order.request_id] = order
        self.wanted(order.adapter.artifact_digest)

    def unload(self, order: Unload, *, used: bool) -> None:
        """Want an adapter off the device; `used` says that a request or a comparison needs it."""
        digest = order.artifact_digest
        slot = self._memory.residency.find(digest)
        if digest in self._memory.residency.pinned:
            self._failures.append(Failure(order.request_id, *_PINNED))
            return
        if used:
            self._failures.append(Failure(order.request_id, *_IN_USE))
            return
        self.failed(digest, _UNLOADED)
        self._unloads[order.request_id] = slot is not None and not slot.loading
        if slot is None:
            self._done.append(Steered(order.request_id, self._unloads.pop(order.request_id)))
        else:
            self._memory.unload(slot, order.request_id)

    def pin(self, order: Pin, requests: Iterable[Request]) -> None:
        """Keep an adapter, if that leaves room for `requests`, which are all there are, and for any other."""
        residency = self._memory.residency
        problem = refusal.pin(order, residency.pinned, self._config, requests)
        if problem is not None:
            self._failures.append(Failure(order.request_id, *problem))
            return
        self.wanted(order.artifact_digest)
        self._done.append(Steered(order.request_id, residency.find(order.artifact_digest) is not None))
        self._memory.pin(order.artifact_digest, refusal.pinned_bytes(order))

    def unpin(self, artifact_digest: str) -> None:
        """Keep an adapter no longer, and load it no more where it was to be loaded for that."""
        self._memory.unpin(artifact_digest)
        self.failed(artifact_digest, _UNPINNED, {Urgency.PINNED})

    def remove(self, request_id: int) -> None:
        """Forget a load; an order to unload is done all the same."""
        self._loads.pop(request_id, None)

    # What happens to adapters.

    def wanted(self, artifact_digest: str) -> None:
        """Note that somebody wants an adapter: it is not unloaded then."""
        slot = self._memory.residency.find(artifact_digest)
        if slot is not None and slot.unload_ids:
            for order_id in self._memory.keep(slot):
                del self._unloads[order_id]
                self._failures.append(Failure(order_id, *_IN_USE))

    def wants(self, artifact_digest: str) -> bool:
        """Tell whether a load of an adapter is not done."""
        return any(load.adapter.artifact_digest == artifact_digest for load in self._loads.values())

    def loaded(self, artifact_digest: str) -> None:
        """Note that an adapter is on the device."""
        for load in self._of(artifact_digest):
            del self._loads[load.request_id]
            self._done.append(Steered(load.request_id, was_on_device=False))

    def failed(self, artifact_digest: str, problem: Problem, urgencies: Collection[Urgency] = tuple(Urgency)) -> None:
        """Note that an adapter will not come."""
        for load in self._of(artifact_digest):
            if load.urgency in urgencies:
                del self._loads[load.request_id]
                self._failures.append(Failure(load.request_id, *problem))

    def place(self, claimed: Collection[str], *, reserve: int, now: float, is_quiet: bool) -> list[Placement]:
        """Return loads to start beside what waiting requests claim and `reserve` chunks that they need.

        Strictly by urgency and arrival: who finds no room is waited for by all that are no more urgent, but those that
        nobody waits for are dropped. `is_quiet` says that nothing runs, waits or loads: then room will never come.
        """
        placements: list[Placement] = []
        blocked = False
        for load in sorted(self._loads.values(), key=lambda load: (load.urgency, load.request_id)):
            if self._memory.residency.find(load.adapter.artifact_digest) is not None:
                continue  # on its way
            placement = None
            if not blocked:
                claim = _Claim(load.request_id)
                ahead = load.urgency is Urgency.AHEAD
                placement = self._memory.place(load.adapter, claim, claimed, reserve=reserve, now=now, ahead=ahead)
            if placement is not None:
                placements.append(replace(placement, urgency=load.urgency))
            elif load.urgency >= Urgency.REFUSED or (is_quiet and not placements):
                del self._loads[load.request_id]
                self._failures.append(Failure(load.request_id, *_NO_ROOM))
            else:
                blocked = True
        return placements

    def _of(self, artifact_digest: str) -> list[Load]:
        return [load for load in self._loads.values() if load.adapter.artifact_digest == artifact_digest]


_PINNED: Final = Problem(
    "FAILED_PRECONDITION", "the adapter is pinned on this worker; unpin it first", {"field": "artifact_digest"}
)
_IN_USE: Final = Problem(
    "FAILED_PRECONDITION",
    "requests on this worker use the adapter; try again when they have ended",
    {"field": "artifact_digest"},
)
_UNLOADED: Final = Problem("FAILED_PRECONDITION", "the adapter was unloaded before it was on the device")
_UNPINNED: Final = Problem("FAILED_PRECONDITION", "the adapter was unpinned before it was on the device")
_NO_ROOM: Final = refusal.device_full(
    "what is in use or pinned, or was used of late, leaves no room on the device for the adapter; try again later, or "
    "unpin others"
)
