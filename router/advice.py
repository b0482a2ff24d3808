"""What an operator might do about the traffic and the pins that a router sees, with the figures it follows from. Pure.

Rates are requests per second. What is advised is never done by itself.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from router.catalog import Adapter
from router.demand import AdapterDemand, AdapterKey
from router.pins import UnmetPin

MAX_PER_KIND: Final = 20
_MAX_REASONS: Final = 3  # of workers that are told with a pin

_COLD_RATIO: Final = 0.2
"""Of a busy adapter's requests that wait for its load; from here on it should be kept."""

_LOAD_SHARE: Final = 0.1
"""Seconds that requests wait for loads, per second; below, loads disturb nobody."""

_OF_LOADS: Final = 0.5
"""Share of that waiting that one has to cause, with less than half as large a share of the requests."""

_MERGE_RATE: Final = 1.0
_MERGE_SHARE: Final = 0.8
"""A worker with such a rate, and such a share of it for one adapter, would serve that adapter better merged."""


class AdviceKind(enum.Enum):
    """What is advised."""

    PROMOTE = "promote"
    THROTTLE = "throttle"
    MERGE = "merge"
    UNMET_PIN = "unmet_pin"


@dataclass(frozen=True, slots=True)
class Advice:
    """One piece of advice. `adapter` is empty where it is about a whole tenant, `worker_id` where about no worker.

    `figures` are what `reason` says in words: names end in what they count, `_per_second`, `_ratio`, `_s`.
    """

    kind: AdviceKind
    tenant: str
    adapter: str
    worker_id: str
    figures: Mapping[str, float]
    reason: str


def advise(
    adapters: Sequence[AdapterDemand],
    workers: Mapping[str, Mapping[AdapterKey, float]],
    pinned: Collection[AdapterKey],
    promote_rate: float,
) -> tuple[Advice, ...]:
    """Return what the traffic suggests, the most pressing of each kind first.

    `workers` are the rates of each adapter on each worker, the base's included; `pinned` adapters are kept already.
    """
    found = (_promotions(adapters, pinned, promote_rate), _throttles(adapters), _merges(workers))
    return tuple(advice for kind in found for advice in kind[:MAX_PER_KIND])


def about_pins(adapters: Iterable[Adapter], unmet: Mapping[str, UnmetPin]) -> tuple[Advice, ...]:
    """Return the pinned adapters that fewer workers keep than shall, those with the smallest share first.

    `unmet` has them by artifact digest.
    """
    found = []
    for adapter in adapters:
        pin = unmet.get(adapter.current.artifact_digest)
        if not adapter.pin_replicas or pin is None:
            continue
        told = [f"{worker_id} {why}" for worker_id, why in list(pin.reasons.items())[:_MAX_REASONS]]
        if len(pin.reasons) > len(told):
            told.append(f"and {len(pin.reasons) - len(told)} more")
        told = told or ["no worker of its base is here"]
        reason = f"pinned on {pin.num_kept} of {pin.num_wanted} workers; {'; '.join(told)}"
        figures = {"kept_ratio": pin.num_kept / pin.num_wanted}
        worker_id = next(iter(pin.reasons), "")
        found.append(Advice(AdviceKind.UNMET_PIN, adapter.tenant, adapter.name, worker_id, figures, reason))
    found.sort(key=lambda advice: (advice.figures["kept_ratio"], advice.tenant, advice.adapter))
    return tuple(found[:MAX_PER_KIND])


def _promotions(adapters: Iterable[AdapterDemand], pinned: Collection[AdapterKey], promote_rate: float) -> list[Advice]:
    found = []
    for demand in adapters:
        if demand.key in pinned or demand.rate < promote_rate or demand.cold_rate < _COLD_RATIO * demand.rate:
            continue
        ratio = min(1.0, demand.cold_rate / demand.rate)
        load_s = demand.load_share / demand.cold_rate
        figures = {"requests_per_second": demand.rate, "cold_ratio": ratio, "mean_load_s": load_s}
        reason = (
            f"{ratio:.0%} of its {demand.rate:.2g} requests per second wait for it to be loaded, {load_s:.2g} s each; "
            f"pin it (loraplex adapter pin {demand.key.name}), or give adapters more room"
        )
        found.append(Advice(AdviceKind.PROMOTE, demand.key.tenant, demand.key.name, "", figures, reason))
    return sorted(found, key=lambda advice: -advice.figures["cold_ratio"] * advice.figures["requests_per_second"])


def _throttles(adapters: Sequence[AdapterDemand]) -> list[Advice]:
    by_adapter = {(demand.key.tenant, demand.key.name): (demand.rate, demand.load_share) for demand in adapters}
    by_tenant: dict[tuple[str, str], tuple[float, float]] = {}
    for (tenant, _), (rate, load_share) in by_adapter.items():
        before = by_tenant.get((tenant, ""), (0.0, 0.0))
        by_tenant[tenant, ""] = before[0] + rate, before[1] + load_share
    found = [*_displacing(by_tenant), *_displacing(by_adapter)]
    return sorted(found, key=lambda advice: -advice.figures["load_s_per_second"])


def _displacing(demands: Mapping[tuple[str, str], tuple[float, float]]) -> list[Advice]:
    """Return advice on those whose loads make most of the waiting while they make little of the requests."""
    all_requests = sum(rate for rate, _ in demands.values())
    all_loads = sum(load_share for _, load_share in demands.values())
    found = []
    for (tenant, name), (rate, load_share) in demands.items():
        if all_loads < _LOAD_SHARE or load_share >= all_loads:  # nobody else waits, so nobody is displaced
            continue
        of_loads, of_requests = load_share / all_loads, rate / all_requests
        if of_loads < _OF_LOADS or of_requests * 2 > of_loads:
            continue
        figures = {
            "requests_per_second": rate,
            "load_s_per_second": load_share,
            "share_of_loads_ratio": of_loads,
            "share_of_requests_ratio": of_requests,
        }
        whose = "its loads are" if name else "the loads of its adapters are"
        reason = (
            f"{whose} {of_loads:.0%} of the time that requests wait for adapters, with {of_requests:.0%} of the "
            "requests: they push out what others ask for; bound its requests, or pin what others need"
        )
        found.append(Advice(AdviceKind.THROTTLE, tenant, name, "", figures, reason))
    return found


def _merges(workers: Mapping[str, Mapping[AdapterKey, float]]) -> list[Advice]:
    found = []
    for worker_id, rates in sorted(workers.items()):
        total = sum(rates.values())
        key, rate = max(rates.items(), key=lambda item: (item[1], item[0].tenant, item[0].name))
        if not key.name or total < _MERGE_RATE or rate < _MERGE_SHARE * total:
            continue
        figures = {"requests_per_second": total, "share_of_worker_ratio": rate / total}
        reason = (
            f"{rate / total:.0%} of the {total:.2g} requests per second that go to {worker_id} are for it; a worker of "
            "its own with the adapter merged into the base would compute them without LoRA"
        )
        found.append(Advice(AdviceKind.MERGE, key.tenant, key.name, worker_id, figures, reason))
    return sorted(found, key=lambda advice: -advice.figures["requests_per_second"])
