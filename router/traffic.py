"""What this router's requests tell of its adapters, and what was decided for them: between `forward` and `steering`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Final

from loraplex.types.v1 import generation_pb2
from router.catalog import Resolved, Version
from router.demand import AdapterDemand, AdapterKey, Demand

HALF_LIFE_S: Final = 60.0
MAX_UNMET: Final = 64
"""Adapters that are remembered as not waited for; who finds no place among them asks again."""


class Traffic:
    """Counts requests. `clock` returns monotonic seconds."""

    def __init__(self, half_life_s: float = HALF_LIFE_S, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.demand = Demand(half_life_s)
        self.replicas: Mapping[str, int] = {}
        """On how many workers' devices artifacts shall be, by digest; of others nothing was decided."""
        self.has_unmet = asyncio.Event()
        """Set while `take_unmet` has something to return."""
        self._unmet: dict[tuple[str, str], Version] = {}  # by worker id and artifact
        self._clock = clock

    def now(self) -> tuple[list[AdapterDemand], dict[str, dict[AdapterKey, float]]]:
        """Return what is asked of each adapter, most first, and each adapter's rate on each worker."""
        now_s = self._clock()
        return self.demand.adapters(now_s), self.demand.workers(now_s)

    def replicas_of(self, resolved: Resolved) -> int:
        """Return on how many workers' devices a request's adapter shall be; 0 where nothing was decided."""
        return self.replicas.get(resolved.version.artifact_digest, 0) if resolved.version is not None else 0

    def arrived(self, tenant: str, resolved: Resolved, prompt_tokens: int) -> None:
        """Note a request. Only what names a current version counts as demand for an adapter."""
        if resolved.version is not None and "@" not in resolved.model:
            self.demand.arrived(_key(tenant, resolved), prompt_tokens, self._clock())

    def placed(self, tenant: str, resolved: Resolved, worker_id: str) -> None:
        """Note that a worker has begun to answer a request."""
        self.demand.placed(worker_id, _key(tenant, resolved), self._clock())

    def finished(self, tenant: str, resolved: Resolved, facts: generation_pb2.ServingFacts) -> None:
        """Note how a request was served."""
        if resolved.version is not None and facts.tier_hit not in (
            generation_pb2.ADAPTER_TIER_UNSPECIFIED,
            generation_pb2.ADAPTER_TIER_DEVICE,
        ):
            load_s = facts.adapter_load_time.ToNanoseconds() / 1e9
            self.demand.waited(_key(tenant, resolved), load_s, self._clock())

    def could_not_wait(self, worker_id: str, version: Version) -> None:
        """Note that a request was refused which would have gone to a worker, and that its adapter is not there."""
        if len(self._unmet) < MAX_UNMET:
            self._unmet[worker_id, version.artifact_digest] = version
            self.has_unmet.set()

    def take_unmet(self) -> list[tuple[str, Version]]:
        """Return which workers lacked which adapters since the last call."""
        unmet, self._unmet = self._unmet, {}
        self.has_unmet.clear()
        return [(worker_id, version) for (worker_id, _), version in unmet.items()]


def _key(tenant: str, resolved: Resolved) -> AdapterKey:
    return AdapterKey(tenant, resolved.model.partition("@")[0] if resolved.version is not None else "")
