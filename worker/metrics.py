"""What a worker tells Prometheus: its status as it is now, and what its requests took.

The names with `vllm:` are those that Kubernetes inference gateways look for. Labels are bounded, but for the one they
ask for too: `vllm:lora_requests_info` lists the adapters in use, by artifact digest, in one series at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from common.call_interceptor import CallMetrics
from common.metrics import new_registry, render
from loraplex.errors import LoraplexError
from worker.status import State, Tier, WorkerStatus

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_STEP_SECONDS: Final = tuple(round(0.001 * 10 ** (n / 8), 5) for n in range(33))
"""1 ms to 10 s, eight to a decade: fine enough to tell a median by."""
_TOKEN_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the worker is at the moment of a scrape."""

    status: WorkerStatus
    engine_restarts: int
    cached_bytes: int
    """Of adapters on the disk."""
    resident_bytes: int
    """Of adapters on the device."""
    max_resident_adapters: int


class Observation:
    """Measures one Generate RPC. Ended once, whoever notices its end first."""

    def __init__(self, metrics: Metrics, arrival_s: float) -> None:
        self._metrics = metrics
        self._arrival_s = arrival_s
        self._first_s: float | None = None
        self._num_tokens = 0
        self._outcome: tuple[str, str] | None = None
        self._ended = False

    def prompt(self, num_tokens: int) -> None:
        """Count the prompt, once the engine has it."""
        self._metrics.prompt_tokens.inc(num_tokens)

    def adapter(self, tier: Tier, wait_s: float) -> None:
        """Note where the request found its adapter, and how long it waited for it."""
        self._metrics.adapter_requests.labels(tier.value).inc()
        if tier is not Tier.DEVICE:
            self._metrics.adapter_load_s.labels(tier.value).observe(wait_s)

    def tokens(self, count: int) -> None:
        """Count tokens that are about to be sent."""
        if self._first_s is None:
            self._first_s = time.monotonic()
            self._metrics.first_token_s.observe(self._first_s - self._arrival_s)
        self._num_tokens += count
        self._metrics.generation_tokens.inc(count)

    def finished(self) -> None:
        """Note that the answer is complete."""
        self._outcome = ("ok", "")

    def failed(self, error: LoraplexError) -> None:
        """Note that the request ended with an error."""
        self._outcome = self._outcome or ("error", error.reason)

    def end(self) -> None:
        """Record the outcome: cancelled where none was told."""
        if self._ended:
            return
        self._ended = True
        outcome, reason = self._outcome or ("cancelled", "")
        self._metrics.requests.labels(outcome, reason).inc()
        if outcome != "ok":
            return
        now_s = time.monotonic()
        self._metrics.request_s.observe(now_s - self._arrival_s)
        if self._first_s is not None and self._num_tokens > 1:
            self._metrics.inter_token_s.observe((now_s - self._first_s) / (self._num_tokens - 1))


class Metrics:
    """The worker's Prometheus metrics. `snapshot` is asked once per scrape."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot
        registry = self.registry = new_registry()
        registry.register(_Status(self))
        self.calls = CallMetrics(registry)
        self.requests = Counter(
            "loraplex_worker_requests",
            "Admitted Generate requests ended, by outcome (ok, cancelled, error) and an error's reason",
            ("outcome", "reason"),
            registry=registry,
        )
        self.first_token_s = Histogram(
            "loraplex_worker_time_to_first_token_seconds",
            "Time from a request's arrival to its first tokens",
            buckets=_SECONDS,
            registry=registry,
        )
        self.inter_token_s = Histogram(
            "loraplex_worker_inter_token_seconds",
            "Mean time between the tokens of an answer, per complete answer",
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )
        self.request_s = Histogram(
            "loraplex_worker_request_seconds",
            "Time from arrival to the end of a complete answer",
            buckets=_SECONDS,
            registry=registry,
        )
        self.step_s = Histogram(
            "loraplex_worker_step_seconds",
            "Time of an engine step, from its schedule to its update",
            buckets=_STEP_SECONDS,
            registry=registry,
        )
        self.slowest_step_s = Gauge(
            "loraplex_worker_slowest_step_seconds",
            "The slowest engine step since the worker started",
            registry=registry,
        )
        self._slowest_step_s = 0.0
        self.prompt_tokens = Counter("loraplex_worker_prompt_tokens", "Prompt tokens computed", registry=registry)
        self.generation_tokens = Counter("loraplex_worker_generation_tokens", "Tokens generated", registry=registry)
        self.adapter_requests = Counter(
            "loraplex_worker_adapter_requests",
            "Answers with an adapter, by where it was when the request came",
            ("tier",),
            registry=registry,
        )
        self.adapter_load_s = Histogram(
            "loraplex_worker_adapter_load_seconds",
            "Time a request waited for its adapter, by where it came from",
            ("tier",),
            buckets=_SECONDS,
            registry=registry,
        )

    def step(self, seconds: float) -> None:
        """Note what an engine step took."""
        self.step_s.observe(seconds)
        if seconds > self._slowest_step_s:
            self._slowest_step_s = seconds
            self.slowest_step_s.set(seconds)

    async def read(self) -> bytes:
        """Return everything in the Prometheus text format."""
        return render(self.registry)

    def of_status(self) -> Iterator[Metric]:
        """Yield what the worker's status says."""
        snapshot = self._snapshot()
        status = snapshot.status
        used = status.total_blocks - status.free_blocks
        usage = used / status.total_blocks if status.total_blocks else 0.0
        yield GaugeMetricFamily("vllm:num_requests_running", "Requests in the batch", status.running_requests)
        yield GaugeMetricFamily("vllm:num_requests_waiting", "Requests not in the batch yet", status.waiting_requests)
        yield GaugeMetricFamily("vllm:kv_cache_usage_perc", "Memory that is in use and cannot be had; 1 is all", usage)
        yield _adapters_in_use(status, snapshot.max_resident_adapters)
        yield _gauge("kv_blocks_in_use", "KV blocks that requests hold", status.kv_blocks)
        yield _gauge("kv_blocks", "KV blocks there are, were nothing else in the arena", status.total_blocks)
        yield _arena(status)
        yield _count("preemptions", "Times a running request had to stop and be recomputed", status.num_preempted)
        yield _count("cached_prompt_tokens", "Prompt tokens found in the prefix cache", status.num_cached_tokens)
        yield _gauge("queued_prefill_tokens", "Prompt tokens to be computed", status.queued_prefill_tokens)
        tiers = [adapter.tier for adapter in status.adapters.values()]
        yield _gauge("resident_adapters", "Adapters on the device", tiers.count(Tier.DEVICE))
        yield _gauge("resident_adapter_bytes", "Device bytes of adapters", snapshot.resident_bytes)
        yield _gauge("cached_adapters", "Adapters on the device or on the disk", len(tiers) - tiers.count(Tier.SOURCE))
        yield _gauge("cache_bytes", "Bytes of adapters cached on the disk", snapshot.cached_bytes)
        yield from _tiers(status)
        adapters = status.adapters.values()
        yield _gauge("pinned_adapters", "Adapters kept whatever the demand", sum(each.pinned for each in adapters))
        refused = sum(bool(each.quarantine_reason) for each in adapters)
        yield _gauge("quarantined_adapters", "Adapters that failed and are refused for a while", refused)
        state = GaugeMetricFamily("loraplex_worker_state", "1 for the state the worker is in", labels=["state"])
        for each in State:
            state.add_metric([each.value], each is status.state)
        yield state
        yield CounterMetricFamily(
            "loraplex_worker_engine_restarts", "Engine processes lost and replaced", snapshot.engine_restarts
        )


class _Status(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics.of_status()

    def describe(self) -> list[Metric]:
        return []  # known when asked; registering must not ask a worker that is being built


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(f"loraplex_worker_{name}", meaning, value)


def _count(name: str, meaning: str, value: float) -> Metric:
    return CounterMetricFamily(f"loraplex_worker_{name}", meaning, value)


def _tiers(status: WorkerStatus) -> Iterator[Metric]:
    """Yield how full each tier is that the worker has."""
    figures = {
        "bytes": ("Bytes of adapters by tier", "used_bytes"),
        "budget_bytes": ("Most bytes of adapters by tier", "budget_bytes"),
        "adapters": ("Adapters by tier", "num_adapters"),
    }
    for name, (meaning, attribute) in figures.items():
        family = GaugeMetricFamily(f"loraplex_worker_tier_{name}", meaning, labels=["tier"])
        for tier, use in status.tiers.items():
            family.add_metric([tier.value], getattr(use, attribute))
        yield family


def _arena(status: WorkerStatus) -> Metric:
    arena = GaugeMetricFamily("loraplex_worker_arena_chunks", "Chunks of the arena by use", labels=["use"])
    used = {"kv": status.kv_blocks, "adapter": status.adapter_chunks, "idle_prefix": status.prefix_blocks}
    for use, count in used.items():
        arena.add_metric([use], count)
    arena.add_metric(["free"], status.total_blocks - sum(used.values()))
    return arena


def _adapters_in_use(status: WorkerStatus, max_adapters: int) -> Metric:
    """Return the adapters that requests use: on the device (running) or on their way there (waiting)."""
    used = [adapter for adapter in status.adapters.values() if adapter.in_flight]
    running = ",".join(adapter.artifact_digest for adapter in used if adapter.tier is Tier.DEVICE)
    waiting = ",".join(adapter.artifact_digest for adapter in used if adapter.tier is not Tier.DEVICE)
    labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
    info = GaugeMetricFamily("vllm:lora_requests_info", "Adapters in use; the value is the time", labels=labels)
    info.add_metric([str(max_adapters), running, waiting], time.time())
    return info
