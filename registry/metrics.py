"""What the registry tells Prometheus: what it stores, as the database says at that moment, and who is connected."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from common.call_interceptor import CallMetrics
from common.metrics import new_registry, render
from loraplex.errors import LoraplexError
from registry.head_signal import HeadSignal
from registry.store import Store, Totals

log = structlog.get_logger(__name__)

_WATCH: Final = "/loraplex.registry.v1.AdapterService/Watch"
_UPLOAD: Final = "/loraplex.registry.v1.AdapterService/UploadArtifact"
_DATABASE_WAIT_S: Final = 2.0
"""For the totals; a scrape does not wait longer for a database that is away."""


class Metrics:
    """The registry's Prometheus metrics. While the database cannot be read, what it holds is left out."""

    def __init__(self, store: Store, signal: HeadSignal) -> None:
        self._store = store
        self._signal = signal
        self._totals: Totals | None = None
        self.registry: CollectorRegistry = new_registry()
        self.registry.register(_Gauges(self))
        self.calls = CallMetrics(self.registry)

    async def read(self) -> bytes:
        """Return everything in the Prometheus text format."""
        try:
            async with asyncio.timeout(_DATABASE_WAIT_S), self._store.read() as reader:
                self._totals = await reader.totals()
        except (LoraplexError, TimeoutError) as error:
            log.warning("registry.metrics_without_database", error=str(error))
            self._totals = None
        return render(self.registry)

    def gauges(self) -> Iterator[Metric]:
        """Yield what is read anew for each scrape."""
        totals = self._totals
        yield _gauge("database_up", "Whether the database could be read for this scrape", totals is not None)
        yield _gauge("head_revision", "Newest revision this process knows", self._signal.revision)
        yield _gauge("watchers", "Watch streams that are open", self.calls.num_open(_WATCH))
        yield _gauge("uploads_in_progress", "Uploads being received or processed", self.calls.num_open(_UPLOAD))
        if totals is not None:
            yield _gauge("base_models", "Base models registered", totals.num_base_models)
            yield _gauge("adapters", "Adapters registered", totals.num_adapters)
            yield _gauge("adapter_versions", "Adapter versions kept", totals.num_versions)
            yield _gauge("artifact_bytes", "Bytes of all artifacts that a version names", totals.artifact_bytes)


class _Gauges(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics.gauges()

    def describe(self) -> list[Metric]:
        return []  # known when asked


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(f"loraplex_registry_{name}", meaning, value)
