"""What the router counts. Labels are bounded: fronts, reasons of the error tree, worker states; never model names."""

from __future__ import annotations

import time
from typing import Final

from prometheus_client import Counter, Gauge, Histogram

from common.metrics import new_registry, render
from loraplex.errors import Cancelled, LoraplexError
from router.catalog import Catalog
from router.fleet import Fleet
from router.placement import State

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Observation:
    """Measures one request from arrival to end. The first outcome that is told stays."""

    def __init__(self, metrics: Metrics, front: str) -> None:
        self._metrics = metrics
        self._front = front
        self._begin_s = time.perf_counter()
        self._outcome: tuple[str, str] | None = None

    def first_event(self) -> None:
        """Note that the worker's first event is there."""
        self._metrics.first_event_s.labels(self._front).observe(time.perf_counter() - self._begin_s)

    def usage(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Count the tokens of an answered request."""
        self._metrics.tokens.labels("prompt").inc(prompt_tokens)
        self._metrics.tokens.labels("completion").inc(completion_tokens)

    def failed(self, error: LoraplexError) -> None:
        """Note that the request ended with an error; the client's leaving is one on the HTTP front."""
        if isinstance(error, Cancelled):
            self.cancelled()
        self._outcome = self._outcome or ("error", error.reason)

    def cancelled(self) -> None:
        """Note that the client went away."""
        self._outcome = self._outcome or ("cancelled", "")

    def end(self) -> None:
        """Record the outcome: ok where none was told."""
        self._metrics.requests.labels(self._front, *(self._outcome or ("ok", ""))).inc()
        self._metrics.request_s.labels(self._front).observe(time.perf_counter() - self._begin_s)


class Metrics:
    """The router's Prometheus metrics, in a registry of their own."""

    def __init__(self, catalog: Catalog, fleet: Fleet) -> None:
        self._catalog = catalog
        self._fleet = fleet
        self.registry = new_registry()
        self.requests = Counter(
            "loraplex_router_requests",
            "Requests ended, by outcome (ok, cancelled, error) and an error's reason",
            ("front", "outcome", "reason"),
            registry=self.registry,
        )
        self.request_s = Histogram(
            "loraplex_router_request_seconds",
            "Time from arrival to the last event",
            ("front",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.first_event_s = Histogram(
            "loraplex_router_time_to_first_token_seconds",
            "Time from arrival to the worker's first event",
            ("front",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.tokens = Counter(
            "loraplex_router_tokens", "Tokens of answered requests", ("kind",), registry=self.registry
        )
        self.retries = Counter(
            "loraplex_router_retries", "Requests tried on a second worker", ("reason",), registry=self.registry
        )
        self.orders = Counter(
            "loraplex_router_adapter_orders",
            "What workers were told of adapters unasked (pin, unpin, to_disk, to_device, for_request); the reason "
            "where one refused",
            ("kind", "reason"),
            registry=self.registry,
        )
        self.in_flight = Gauge("loraplex_router_requests_in_flight", "Requests in flight", registry=self.registry)
        self._revision = Gauge("loraplex_router_catalog_revision", "Revision of the catalog", registry=self.registry)
        self._workers = Gauge("loraplex_router_workers", "Known workers by state", ("state",), registry=self.registry)

    def retried(self, reason: str) -> None:
        """Count a request that goes to a second worker because of `reason`."""
        self.retries.labels(reason).inc()

    def ordered(self, kind: str, reason: str) -> None:
        """Count what a worker was told; `reason` is empty where it did so."""
        self.orders.labels(kind, reason).inc()

    def render(self) -> bytes:
        """Return everything in the Prometheus text format."""
        self._revision.set(self._catalog.snapshot.revision)
        states = [view.state for view in self._fleet.views()]
        for state in State:
            self._workers.labels(state.value).set(states.count(state))
        return render(self.registry)

    async def read(self) -> bytes:
        """Return the same, for the admin routes."""
        return self.render()
