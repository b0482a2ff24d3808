"""Where adapters shall be before their requests come, decided by how much they are asked for. No I/O, no clock.

An adapter that is asked for at all often is kept on the disk of the worker its requests would go to; one that is asked
for often is promoted: kept on the device of one worker, or of several where waiting there would cost more than loading
it elsewhere. Each step up and down has a threshold of its own and a least time between them.

What is fetched ahead is bounded by most of each tier's bytes and of the device's places. What finds no place on the
device is kept on the disk.

A step down takes nothing away: the adapter is not fetched again and its requests gather on fewer workers, whose own
eviction, which sees all routers' requests, takes what is no longer asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from router.catalog import Version
from router.demand import AdapterDemand, AdapterKey
from router.orders import Order, OrderKind
from router.placement import (
    TIE_RATIO,
    TIE_S,
    PlacementRequest,
    State,
    Tier,
    TierUse,
    WorkerView,
    expected_s,
    homes,
    in_quarantine,
    is_warm,
    rendezvous_weight,
)

_SHARE: Final = 0.8  # of a tier's bytes and places is for what is fetched ahead; the rest is for what comes unforeseen
_KEPT_RATIO: Final = 1.25  # so much more than one on a device another must be asked for to be given its room
_SHRINK_RATIO: Final = 0.5  # of the rate at which a replica was added; below, it is one too many
_MAX_ORDERS: Final = 64


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Rates are requests per second of one adapter at this router."""

    promote_rate: float = 0.1
    demote_rate: float = 0.03
    dwell_s: float = 60.0
    spread_after_s: float = 2.0
    max_replicas: int = 4


@dataclass(frozen=True, slots=True)
class Wanted:
    """An adapter that requests ask for: what its name means now, and how often."""

    demand: AdapterDemand
    version: Version


@dataclass(frozen=True, slots=True)
class Promotion:
    """On how many devices an adapter shall be. `rates` are those at which the second, third... replica was added."""

    replicas: int
    since_s: float
    rates: tuple[float, ...] = ()
    pressed_since_s: float | None = None
    """Since when it would pay to have it elsewhere too; None: it would not."""


@dataclass(frozen=True, slots=True)
class PolicyPlan:
    """What to tell workers now, and on how many workers' devices artifacts shall be, by digest."""

    orders: tuple[Order, ...]
    replicas: Mapping[str, int]


class AdapterPolicy:
    """Decides from rates and from what workers report. Remembers what is promoted, and since when."""

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings
        self._promoted: dict[AdapterKey, Promotion] = {}

    @property
    def promoted(self) -> Mapping[AdapterKey, Promotion]:
        """What is promoted now."""
        return self._promoted

    def plan(self, wanted: Iterable[Wanted], workers: Sequence[WorkerView], now_s: float) -> PolicyPlan:
        """Return what to tell which worker; of equals those go first that do so in `wanted`."""
        room = _Room(workers)
        orders: list[Order] = []
        replicas: dict[str, int] = {}
        promoted: dict[AdapterKey, Promotion] = {}
        served_merged = {worker.dedicated_artifact_digest for worker in workers if worker.state is State.SERVING}
        for entry in _by_claim(wanted, workers):
            if entry.version.artifact_digest in served_merged:
                continue  # its requests go there
            if entry.demand.rate < self._settings.demote_rate and entry.demand.key not in self._promoted:
                continue
            at_home = _at_home(entry, workers)
            promotion = self._stepped(entry, at_home, now_s)
            if promotion is not None:
                promoted[entry.demand.key] = promotion
                replicas[entry.version.artifact_digest] = promotion.replicas
            if promotion is not None or entry.demand.rate >= self._settings.demote_rate:
                orders += _orders(entry.version, at_home, promotion, self._settings.max_replicas, room)
        # An adapter that is not asked for at all is no longer among `wanted`: it is demoted as others are.
        for key, promotion in self._promoted.items():
            if key not in promoted and now_s - promotion.since_s < self._settings.dwell_s:
                promoted.setdefault(key, promotion)
        self._promoted = promoted
        return PolicyPlan(tuple(orders[:_MAX_ORDERS]), replicas)

    def _stepped(self, entry: Wanted, at_home: Sequence[WorkerView], now_s: float) -> Promotion | None:
        """Return the adapter's promotion after this look; a step at a time."""
        settings, rate = self._settings, entry.demand.rate
        promotion = self._promoted.get(entry.demand.key)
        if promotion is None:
            return Promotion(1, now_s) if rate >= settings.promote_rate else None
        rested = now_s - promotion.since_s >= settings.dwell_s
        if rested and rate < settings.demote_rate:
            return None
        if rested and promotion.rates and rate < _SHRINK_RATIO * promotion.rates[-1]:
            return Promotion(promotion.replicas - 1, now_s, promotion.rates[:-1])
        if promotion.replicas >= min(settings.max_replicas, len(at_home)) or not _would_pay(
            entry, at_home, promotion.replicas
        ):
            return replace(promotion, pressed_since_s=None)
        since_s = now_s if promotion.pressed_since_s is None else promotion.pressed_since_s
        if now_s - max(since_s, promotion.since_s) < settings.spread_after_s:
            return replace(promotion, pressed_since_s=since_s)
        return Promotion(promotion.replicas + 1, now_s, (*promotion.rates, rate))


def _by_claim(wanted: Iterable[Wanted], workers: Sequence[WorkerView]) -> list[Wanted]:
    """Return the most asked for first; what is on a device counts for more, since it is not exchanged for its equal."""
    on_device = {
        digest for worker in workers for digest, residency in worker.adapters.items() if residency.tier is Tier.DEVICE
    }

    def claim(entry: Wanted) -> float:
        return entry.demand.rate * (_KEPT_RATIO if entry.version.artifact_digest in on_device else 1.0)

    return sorted(wanted, key=claim, reverse=True)


def _request(entry: Wanted) -> PlacementRequest:
    version = entry.version
    return PlacementRequest(
        version.base_digest, round(entry.demand.prompt_tokens), version.artifact_digest, version.artifact_bytes
    )


def _at_home(entry: Wanted, workers: Sequence[WorkerView]) -> list[WorkerView]:
    """Return the workers that shall have an adapter, first ones first.

    Those that have it on their device, then those where a request would wait least, about equal ones in rendezvous
    order, then the others. Those that have it in quarantine shall only if all have: requests go to the others.
    """
    digest, request = entry.version.artifact_digest, _request(entry)
    found = homes(entry.version.base_digest, digest, workers)
    found = [worker for worker in found if not in_quarantine(worker, digest)] or found
    waits_s = {worker.worker_id: expected_s(worker, request) for worker in found if not is_warm(worker, digest)}
    limit_s = min(waits_s.values(), default=0.0)
    limit_s += max(TIE_S, TIE_RATIO * limit_s)
    return sorted(found, key=lambda worker: waits_s.get(worker.worker_id, 0.0) > limit_s)  # stable


def _would_pay(entry: Wanted, at_home: Sequence[WorkerView], replicas: int) -> bool:
    """Tell whether a request would wait longer where the adapter is than it would elsewhere, its load included."""
    request = _request(entry)
    here_s = min(expected_s(worker, request) for worker in at_home[:replicas])
    there_s = min(expected_s(worker, request) for worker in at_home[replicas:])
    return here_s > there_s + max(TIE_S, TIE_RATIO * there_s)


class _Room:
    """Bytes and places of each worker's tiers that are spoken for, by what is pinned and by what is more asked for."""

    def __init__(self, workers: Sequence[WorkerView]) -> None:
        pinned: dict[str, tuple[int, int]] = {}
        for worker in workers:
            sizes = [residency.artifact_bytes for residency in worker.adapters.values() if residency.pinned]
            pinned[worker.worker_id] = sum(sizes), len(sizes)
        self._taken = {OrderKind.TO_DEVICE: dict(pinned), OrderKind.TO_DISK: dict(pinned)}

    def take(self, kind: OrderKind, worker: WorkerView, version: Version) -> OrderKind | None:
        """Speak for an artifact's room; returns the tier that has it, the disk where the device has none, or None."""
        if self._claim(kind, worker, version):
            return kind
        if kind is OrderKind.TO_DEVICE and self._claim(OrderKind.TO_DISK, worker, version):
            return OrderKind.TO_DISK
        return None

    def _claim(self, kind: OrderKind, worker: WorkerView, version: Version) -> bool:
        """Speak for an artifact's room in one tier, if it is there. A tier of unknown size has room."""
        if (residency := worker.adapters.get(version.artifact_digest)) is not None and residency.pinned:
            return True
        use: TierUse | None = worker.device_tier if kind is OrderKind.TO_DEVICE else worker.disk_tier
        num_bytes, num_adapters = self._taken[kind].get(worker.worker_id, (0, 0))
        num_bytes, num_adapters = num_bytes + version.artifact_bytes, num_adapters + 1
        if use is not None and (
            num_bytes > _SHARE * use.budget_bytes or (use.max_adapters and num_adapters > _SHARE * use.max_adapters)
        ):
            return False
        self._taken[kind][worker.worker_id] = num_bytes, num_adapters
        return True


def _orders(
    version: Version, at_home: Sequence[WorkerView], promotion: Promotion | None, max_replicas: int, room: _Room
) -> list[Order]:
    """Return what brings the artifact to its devices, and to the disk of the worker that would be next."""
    replicas = promotion.replicas if promotion is not None else 0
    places = [(OrderKind.TO_DEVICE, worker) for worker in at_home[:replicas]]
    if replicas < max_replicas and at_home[replicas:]:
        # Whatever the load: what is fetched ahead must not wander over all disks.
        digest = version.artifact_digest
        next_one = max(
            at_home[replicas:], key=lambda other: (is_warm(other, digest), rendezvous_weight(digest, other.worker_id))
        )
        places.append((OrderKind.TO_DISK, next_one))
    orders: list[Order] = []
    for wanted, worker in places:
        if (kind := room.take(wanted, worker, version)) is None:
            continue
        residency = worker.adapters.get(version.artifact_digest)
        slowest = Tier.DEVICE if kind is OrderKind.TO_DEVICE else Tier.DISK
        if residency is not None and (residency.tier <= slowest or residency.loading or residency.quarantine_reason):
            continue
        orders.append(Order(kind, worker.address, worker.worker_id, worker.epoch, version.base_digest, version))
    return orders
