"""Tells workers, unasked, what adapters to keep and to fetch: the driver of what `pins` and `adapter_policy` decide.

Owns the calls in flight. Looks when the catalog or a worker's residency has changed, when a call ends, when a request
could not wait for its adapter, and when time alone makes something due; at what is asked for, once a second.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import structlog

from loraplex.errors import LoraplexError
from loraplex.worker.v1 import worker_pb2
from router.adapter_policy import AdapterPolicy, PolicySettings, Wanted
from router.catalog import Catalog, Version
from router.fleet import Fleet
from router.forward import to_worker_adapter
from router.orders import Deliveries, Order, OrderKind
from router.pins import PinAnswer, PinPlanner, UnmetPin, desired_pins, earlier
from router.placement import State, WorkerView
from router.traffic import Traffic
from router.worker_calls import answer_of

log = structlog.get_logger(__name__)

CALL_TIMEOUT_S: Final = 15.0
"""Workers answer at once: what is fetched is fetched afterwards."""

_LOOK_EVERY_S: Final = 1.0  # rates fall with time alone

_GATHER_S: Final = 0.1  # a burst of changes is looked at once


class Steering:
    """Keeps workers as they shall be while `run` runs. Without `policy` there are pins only.

    `clock` returns monotonic seconds; `on_order` is told what each worker was told, and the reason where it refused.
    """

    def __init__(
        self,
        catalog: Catalog,
        fleet: Fleet,
        traffic: Traffic,
        policy: PolicySettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_order: Callable[[str, str], None] = lambda _kind, _reason: None,
    ) -> None:
        self._catalog = catalog
        self._fleet = fleet
        self._traffic = traffic
        self._clock = clock
        self._pins = PinPlanner()
        self._policy = AdapterPolicy(policy) if policy is not None else None
        self._policy_look_s = 0.0
        self._pins_again_s: float | None = None
        self._on_order = on_order
        self._deliveries = Deliveries()
        self._pin_answers: dict[tuple[str, str], PinAnswer] = {}  # by worker id and artifact
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Steer until cancelled."""
        await self._catalog.ready.wait()
        has_changed = True
        async with asyncio.TaskGroup() as tasks:
            while True:
                changes = (self._catalog.changed, self._fleet.changed, self._ended)
                self._ended.clear()
                again_s = self._look(tasks, has_changed=has_changed)
                pause_s = None if again_s is None else max(0.0, again_s - self._clock())
                await _any_of((*changes, self._traffic.has_unmet), pause_s)
                await asyncio.sleep(_GATHER_S)
                has_changed = any(change.is_set() for change in changes)

    def unmet_pins(self) -> dict[str, UnmetPin]:
        """Return the pins that workers do not keep, by artifact digest, as far as it is known why."""
        if not self._fleet.is_surveyed:
            return {}
        pins = desired_pins(self._catalog.snapshot.adapters.values())
        return self._pins.unmet(pins, self._fleet.views(), self._pin_answers)

    def _look(self, tasks: asyncio.TaskGroup, *, has_changed: bool) -> float | None:
        """Send what is due; return when to look again though nothing changes."""
        now_s, views = self._clock(), self._fleet.views()
        orders, _ = self._deliveries.begin(_for_requests(self._traffic.take_unmet(), views), now_s)
        again_s: float | None = None
        if self._fleet.is_surveyed:  # an adapter's place among half of the workers would not be its place
            orders += self._due(views, now_s, has_changed=has_changed)
            again_s = earlier(self._pins_again_s, None if self._policy is None else self._policy_look_s)
        for order in orders:
            tasks.create_task(self._answered(order, self._call(order)))
        return again_s

    def _due(self, views: Sequence[WorkerView], now_s: float, *, has_changed: bool) -> list[Order]:
        """Return what pins and the policy have workers told now."""
        orders: list[Order] = []
        if has_changed or (self._pins_again_s is not None and now_s >= self._pins_again_s):
            pins = desired_pins(self._catalog.snapshot.adapters.values())
            here = {view.worker_id for view in views}
            self._pin_answers = {
                key: answer for key, answer in self._pin_answers.items() if key[0] in here and key[1] in pins
            }
            plan = self._pins.plan(pins, views, now_s, in_step=self._catalog.in_step)
            due, again_s = self._deliveries.begin(plan.orders, now_s)
            orders += due
            self._pins_again_s = earlier(plan.again_s, again_s)
        if self._policy is not None and now_s >= self._policy_look_s:
            self._policy_look_s = now_s + _LOOK_EVERY_S
            orders += self._deliveries.begin(self._decided(self._policy, views, now_s), now_s)[0]
        return orders

    def _decided(self, policy: AdapterPolicy, views: Sequence[WorkerView], now_s: float) -> tuple[Order, ...]:
        """Decide from what was asked for lately; return what to tell workers now."""
        adapters = self._catalog.snapshot.adapters
        wanted = [
            Wanted(demand, adapter.current)
            for demand in self._traffic.demand.adapters(now_s)
            if (adapter := adapters.get((demand.key.tenant, demand.key.name))) is not None
        ]
        decided = policy.plan(wanted, views, now_s)
        self._traffic.replicas = decided.replicas
        return decided.orders

    async def _answered(self, order: Order, call: Any) -> None:
        where = {"worker_id": order.worker_id, "artifact": order.version.artifact_digest[:12]}
        try:
            await answer_of(call, order.worker_id)
        except LoraplexError as error:
            self._on_order(order.kind.value, error.reason)
            self._note(order, error.message)
            log.warning("steering.refused", what=order.kind.value, **where, reason=error.reason, error=str(error))
        else:
            self._on_order(order.kind.value, "")
            self._note(order, "")
            log.info("steering.told", what=order.kind.value, **where)
        finally:
            self._deliveries.end(order, self._clock())
            self._ended.set()

    def _note(self, order: Order, refusal: str) -> None:
        """Note what a worker answered to a pin."""
        if order.kind is OrderKind.PIN:
            key = order.worker_id, order.version.artifact_digest
            before = self._pin_answers.get(key)
            times = before.times if before is not None and before.epoch == order.epoch else 0
            self._pin_answers[key] = PinAnswer(order.epoch, times + 1, refusal)

    def _call(self, order: Order) -> Any:
        """Begin a call to a worker that a view has named in this turn of the loop."""
        stub = self._fleet.stub(order.address)
        options: Any = {"timeout": CALL_TIMEOUT_S, "metadata": self._fleet.credentials}
        adapter = to_worker_adapter(order.version)
        match order.kind:
            case OrderKind.PIN | OrderKind.UNPIN:
                is_pin = order.kind is OrderKind.PIN
                request = worker_pb2.PinAdapterRequest(base_digest=order.base_digest, adapter=adapter, pinned=is_pin)
                return stub.PinAdapter(request, **options)
            case OrderKind.TO_DISK | OrderKind.TO_DEVICE | OrderKind.FOR_REQUEST:
                prefetch = worker_pb2.PrefetchAdapterRequest(
                    base_digest=order.base_digest,
                    adapter=adapter,
                    to_device=order.kind is not OrderKind.TO_DISK,
                    for_request=order.kind is OrderKind.FOR_REQUEST,
                )
                return stub.PrefetchAdapter(prefetch, **options)


def _for_requests(unmet: Iterable[tuple[str, Version]], views: Sequence[WorkerView]) -> list[Order]:
    """Return what brings adapters to workers that requests would have gone to, those that are still there."""
    workers = {view.worker_id: view for view in views if view.state is State.SERVING}
    return [
        Order(OrderKind.FOR_REQUEST, worker.address, worker_id, worker.epoch, version.base_digest, version)
        for worker_id, version in unmet
        if (worker := workers.get(worker_id)) is not None
    ]


async def _any_of(events: tuple[asyncio.Event, ...], timeout_s: float | None) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
