"""Which workers keep which pinned adapters, and what they must be told for it. No I/O, no clock; time is an argument.

A pin belongs to the first workers of its base in the order of rendezvous hashes, so that routers that know nothing of
each other choose the same ones. A worker that cannot be reached keeps its place for a while: a pin does not move for a
restart. Nothing is unpinned where that might be another router's better knowledge: only while the registry is followed,
what this router did not see unpinned itself only after a while, and what is pinned on too many workers only once those
that shall keep it have it on their device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from router.catalog import Adapter, Version
from router.orders import Order, OrderKind
from router.placement import State, Tier, WorkerView, rendezvous_weight

AWAY_S: Final = 30.0
"""How long a worker that is away, or starts again, keeps its place among those that keep pins."""

UNDO_AFTER_S: Final = 10.0
"""How long somebody else's pin must have looked wrong before it is taken back: longer than a catalog is ever late."""

_TICK_S: Final = 1.0
_UNKNOWN: Final = "0" * 64  # for a version's digest; workers ask for the form of one


@dataclass(frozen=True, slots=True)
class Pin:
    """An artifact that so many workers of its base shall keep."""

    version: Version
    replicas: int


def desired_pins(adapters: Iterable[Adapter]) -> dict[str, Pin]:
    """Return the pins of a catalog by artifact digest; of two names of one artifact the larger."""
    pins: dict[str, Pin] = {}
    for adapter in adapters:
        version, replicas = adapter.current, adapter.pin_replicas
        known = pins.get(version.artifact_digest)
        if replicas and (known is None or known.replicas < replicas):
            pins[version.artifact_digest] = Pin(version, replicas)
    return pins


@dataclass(frozen=True, slots=True)
class PinPlan:
    """What to tell workers now, and when time alone changes that (None: never)."""

    orders: tuple[Order, ...]
    again_s: float | None = None


@dataclass(frozen=True, slots=True)
class PinAnswer:
    """What a worker last answered to a pin: `times` is how often it was told in this epoch.

    `refusal` says why it refuses; empty where it does not.
    """

    epoch: str
    times: int
    refusal: str


@dataclass(frozen=True, slots=True)
class UnmetPin:
    """A pin that fewer workers keep than shall. `reasons` says why, by worker id; none where there is no worker."""

    num_kept: int
    num_wanted: int
    reasons: Mapping[str, str]


class PinPlanner:
    """Compares what shall be pinned with what workers say is. Remembers what it has seen, to be slow to undo."""

    def __init__(self) -> None:
        self._serving_s: dict[str, tuple[str, float]] = {}  # by worker id: its base, and when it served last
        self._wrong_s: dict[tuple[str, str], float] = {}  # by worker id and artifact: since when its pin looks wrong
        self._pinned: dict[str, Version] = {}  # what this router has seen in the catalog as pinned

    def plan(self, pins: Mapping[str, Pin], workers: Sequence[WorkerView], now_s: float, *, in_step: bool) -> PinPlan:
        """Return what to tell which worker; `in_step` says that the pins are the registry's of now."""
        workers = [worker for worker in workers if not worker.dedicated_artifact_digest]  # they keep what they have
        self._note_serving(workers, now_s)
        reachable = [worker for worker in workers if worker.state is State.SERVING and not worker.silent]
        chosen = {digest: self._chosen(pin) for digest, pin in pins.items()}
        again_s = self._look_again_s(workers, now_s)
        orders = [
            _order(OrderKind.PIN, worker, pin.version)
            for digest, pin in pins.items()
            for worker in reachable
            if worker.worker_id in chosen[digest] and not _is_pinned(worker, digest)
        ]
        if not in_step:
            self._wrong_s = {}
        else:
            undone, undo_s = self._undo(pins, chosen, reachable, now_s)
            again_s = earlier(again_s, undo_s)
            orders = undone + orders  # what is let go of may be the room that the others need
            self._pinned |= {digest: pin.version for digest, pin in pins.items()}
            held = {digest for worker in workers for digest in worker.adapters}
            self._pinned = {d: version for d, version in self._pinned.items() if d in pins or d in held}
        return PinPlan(tuple(orders), again_s)

    def unmet(
        self, pins: Mapping[str, Pin], workers: Sequence[WorkerView], answers: Mapping[tuple[str, str], PinAnswer]
    ) -> dict[str, UnmetPin]:
        """Return the pins that are not kept, by artifact digest, as far as it is known why.

        `answers` are workers' last, by worker id and artifact digest; one of an earlier epoch tells nothing.
        """
        views = {worker.worker_id: worker for worker in workers}
        unmet: dict[str, UnmetPin] = {}
        for digest, pin in pins.items():
            chosen = self._chosen(pin)
            lacking = {worker_id: _why_not_kept(views.get(worker_id), digest, answers) for worker_id in chosen}
            reasons = {worker_id: why for worker_id, why in sorted(lacking.items()) if why}
            if reasons or not chosen:
                num_kept = sum(why is None for why in lacking.values())
                unmet[digest] = UnmetPin(num_kept, max(1, len(chosen)), reasons)
        return unmet

    def _note_serving(self, workers: Sequence[WorkerView], now_s: float) -> None:
        for worker in workers:
            if worker.state is State.SERVING:
                self._serving_s[worker.worker_id] = worker.base_digest, now_s
            elif worker.state is State.DRAINING:
                self._serving_s.pop(worker.worker_id, None)
        self._serving_s = {
            worker_id: (base, since_s)
            for worker_id, (base, since_s) in self._serving_s.items()
            if now_s - since_s <= AWAY_S
        }

    def _look_again_s(self, workers: Sequence[WorkerView], now_s: float) -> float | None:
        """Return when a worker that is away loses its place, or one that is silent may speak again."""
        again_s: float | None = None
        here = {worker.worker_id for worker in workers if worker.state is State.SERVING}
        for worker_id, (_, since_s) in self._serving_s.items():
            if worker_id not in here:
                again_s = earlier(again_s, since_s + AWAY_S + _TICK_S)
        if any(worker.silent and worker.state is State.SERVING for worker in workers):
            again_s = earlier(again_s, now_s + _TICK_S)
        return again_s

    def _chosen(self, pin: Pin) -> frozenset[str]:
        digest, base = pin.version.artifact_digest, pin.version.base_digest
        able = [worker_id for worker_id, (its_base, _) in self._serving_s.items() if its_base == base]
        if pin.replicas < len(able):
            able.sort(key=lambda worker_id: rendezvous_weight(digest, worker_id), reverse=True)
        return frozenset(able[: pin.replicas])

    def _undo(
        self,
        pins: Mapping[str, Pin],
        chosen: Mapping[str, frozenset[str]],
        reachable: Sequence[WorkerView],
        now_s: float,
    ) -> tuple[list[Order], float | None]:
        settled = {
            digest: sum(_is_settled(worker, digest) for worker in reachable if worker.worker_id in its_workers)
            == len(its_workers)
            for digest, its_workers in chosen.items()
        }
        orders: list[Order] = []
        wrong_s: dict[tuple[str, str], float] = {}
        again_s: float | None = None
        for worker in reachable:
            for digest, residency in worker.adapters.items():
                if not residency.pinned or worker.worker_id in chosen.get(digest, ()):
                    continue
                key = worker.worker_id, digest
                since_s = wrong_s[key] = self._wrong_s.get(key, now_s)
                seen_unpinned = digest in self._pinned and digest not in pins
                due_s = since_s if seen_unpinned else since_s + UNDO_AFTER_S
                if due_s > now_s:
                    again_s = earlier(again_s, due_s)
                elif settled.get(digest, True):
                    version = self._pinned.get(digest) or _only_digest(digest, worker.base_digest)
                    orders.append(_order(OrderKind.UNPIN, worker, version))
        self._wrong_s = wrong_s
        return orders, again_s


def earlier(one_s: float | None, other_s: float | None) -> float | None:
    """Return the earlier of two times; None is never."""
    return min((time_s for time_s in (one_s, other_s) if time_s is not None), default=None)


def _only_digest(digest: str, base_digest: str) -> Version:
    """Return what is known of an artifact that the catalog may no longer name. An unpin needs no more."""
    return Version(_UNKNOWN, digest, base_digest)


def _order(kind: OrderKind, worker: WorkerView, version: Version) -> Order:
    return Order(kind, worker.address, worker.worker_id, worker.epoch, worker.base_digest, version)


def _is_pinned(worker: WorkerView, digest: str) -> bool:
    residency = worker.adapters.get(digest)
    return residency is not None and residency.pinned


def _why_not_kept(worker: WorkerView | None, digest: str, answers: Mapping[tuple[str, str], PinAnswer]) -> str | None:
    """Return why a worker that shall keep an artifact does not, "" where that is not known yet; None where it does."""
    if worker is None or worker.state is not State.SERVING or worker.silent:
        return "is away"
    residency = worker.adapters.get(digest)
    if residency is not None and residency.pinned:
        return f"cannot have it: {residency.quarantine_reason}" if residency.quarantine_reason else None
    answer = answers.get((worker.worker_id, digest))
    if answer is None or answer.epoch != worker.epoch:
        return ""
    if answer.refusal:
        return f"refuses: {answer.refusal}"
    return "" if answer.times < 2 else f"was told {answer.times} times and lets go of it; its log says why"


def _is_settled(worker: WorkerView, digest: str) -> bool:
    residency = worker.adapters.get(digest)
    return residency is not None and residency.pinned and residency.tier is Tier.DEVICE
