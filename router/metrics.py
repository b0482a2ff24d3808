"""What the router counts. Labels are bounded: fronts, reasons of the error tree, worker states; never model names."""

from __future__ import annotations

import time
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from loraplex.errors import LoraplexError
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
        self._outcome: str | None = None

    def first_event(self) -> None:
        """Note that the worker's first event is there."""
        self._metrics.first_event_s.labels(self._front).observe(time.perf_counter() - self._begin_s)

    def usage(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Count the tokens of an answered request."""
        self._metrics.tokens.labels("prompt").inc(prompt_tokens)
        self._metrics.tokens.labels("completion").inc(completion_tokens)

    def failed(self, error: LoraplexError) -> None:
        """Note that the request ended with an error."""
        self._outcome = self._outcome or error.reason

    def cancelled(self) -> None:
        """Note that the client went away."""
        self._outcome = self._outcome or "CANCELLED"

    def end(self) -> None:
        """Record the outcome: OK where none was told."""
        self._metrics.requests.labels(self._front, self._outcome or "OK").inc()
        self._metrics.request_s.labels(self._front).observe(time.perf_counter() - self._begin_s)


class Metrics:
    """The router's Prometheus metrics, in a registry of their own."""

    def __init__(self, catalog: Catalog, fleet: Fleet) -> None:
        self._catalog = catalog
        self._fleet = fleet
        # A time stamp per series says nothing about requests.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "loraplex_router_requests", "Requests ended, by outcome", ("front", "outcome"), registry=self._registry
        )
        self.request_s = Histogram(
            "loraplex_router_request_seconds",
            "Time from arrival to the last event",
            ("front",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.first_event_s = Histogram(
            "loraplex_router_first_event_seconds",
            "Time from arrival to the worker's first event",
            ("front",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.tokens = Counter(
            "loraplex_router_tokens", "Tokens of answered requests", ("kind",), registry=self._registry
        )
        self.retries = Counter(
            "loraplex_router_retries", "Requests tried on a second worker", ("reason",), registry=self._registry
        )
        self.in_flight = Gauge("loraplex_router_requests_in_flight", "Requests in flight", registry=self._registry)
        self._revision = Gauge("loraplex_router_catalog_revision", "Revision of the catalog", registry=self._registry)
        self._workers = Gauge("loraplex_router_workers", "Known workers by state", ("state",), registry=self._registry)

    def retried(self, reason: str) -> None:
        """Count a request that goes to a second worker because of `reason`."""
        self.retries.labels(reason).inc()

    def render(self) -> bytes:
        """Return everything in the Prometheus text format."""
        self._revision.set(self._catalog.snapshot.revision)
        states = [view.state for view in self._fleet.views()]
        for state in State:
            self._workers.labels(state.value).set(states.count(state))
        return generate_latest(self._registry)
