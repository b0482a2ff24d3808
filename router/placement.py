"""Which worker gets a request: a pure function of the request and of what the workers report.

Owns the estimate of a worker's time to first token, in seconds, and the choice among workers that are about equal.
Knows no I/O and no clock; randomness is an argument. The fleet builds the views, `forward` acts on the pick.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from loraplex.errors import NoWorker


class Tier(enum.IntEnum):
    """Where an adapter is on a worker; numbers as in loraplex.types.v1.AdapterTier. Smaller is faster."""

    DEVICE = 1
    HOST = 2
    DISK = 3
    SOURCE = 4


class State(enum.Enum):
    """Where a worker is in its life, as the router sees it."""

    STARTING = "starting"
    SERVING = "serving"
    NOT_SERVING = "not-serving"
    DRAINING = "draining"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class Residency:
    """One adapter on one worker. Where `quarantine_reason` is not empty it is refused until the Unix time beside it."""

    tier: Tier
    loading: bool = False
    in_flight: int = 0
    pinned: bool = False
    artifact_bytes: int = 0
    quarantine_reason: str = ""
    quarantine_end_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TierUse:
    """How full a tier of a worker is."""

    used_bytes: int
    budget_bytes: int
    num_adapters: int
    max_adapters: int = 0
    """0 where only bytes bound it."""


NO_ADAPTERS: Final[Mapping[str, Residency]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What is known of one worker at one moment.

    `own_*` is what this router has sent there and the worker's status does not count yet. `silent` says that the
    worker has not spoken for longer than it should. The fields after `max_context_tokens` are for operators only.
    """

    address: str
    state: State
    worker_id: str = ""
    epoch: str = ""
    base_digest: str = ""
    running_requests: int = 0
    waiting_requests: int = 0
    queued_prefill_tokens: int = 0
    prefill_tokens_per_second: float = 0.0
    decode_tokens_per_second: float = 0.0
    adapters: Mapping[str, Residency] = field(default_factory=lambda: NO_ADAPTERS)
    silent: bool = False
    own_requests: int = 0
    own_prompt_tokens: int = 0
    own_adapters: frozenset[str] = frozenset()
    max_context_tokens: int | None = None
    free_blocks: int = 0
    total_blocks: int = 0
    status_age_s: float = 0.0
    error: str = ""
    device: str = ""
    dtype: str = ""
    base_quantization: str = ""
    device_tier: TierUse | None = None
    host_tier: TierUse | None = None
    disk_tier: TierUse | None = None
    dedicated_artifact_digest: str = ""
    """Of the one adapter that the worker serves; empty where it serves any."""


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What placement knows of a request. `prompt_tokens` is an estimate; without `artifact_digest` it asks the base.

    `replicas` is on how many devices the adapter shall be; 0 leaves it to chance.
    """

    base_digest: str
    prompt_tokens: int
    artifact_digest: str = ""
    artifact_bytes: int = 0
    replicas: int = 0
    beside_base: bool = False
    """The worker must have the base itself: none that is dedicated to an adapter will do."""


@dataclass(frozen=True, slots=True)
class Pick:
    """The chosen worker and its expected time to first token in seconds."""

    worker: WorkerView
    expected_s: float


TIE_S: Final = 0.020
TIE_RATIO: Final = 0.10
MIN_TOKENS_PER_SECOND: Final = 1.0
"""Workers promise a speed above 0; this keeps a broken promise from dividing by zero."""

DEDICATED_PATIENCE_S: Final = 1.0
"""How much longer an adapter's requests wait for a worker of its own before another one takes them."""
WAITING_TOKENS: Final = 16
"""Tokens the running requests generate, all together, until one more waiting request gets its turn; an assumption."""

# (fixed seconds, bytes per second) of bringing an adapter to the device from a tier; orders of magnitude, which is
# all that a choice between workers needs.
_LOAD_COST: Final[Mapping[Tier, tuple[float, float]]] = {
    Tier.HOST: (0.001, 8e9),
    Tier.DISK: (0.005, 1e9),
    Tier.SOURCE: (0.050, 1e8),
}
_LOADING_SHARE: Final = 0.5  # of a load under way, half is left on average


def serves(worker: WorkerView, request: PlacementRequest) -> bool:
    """Tell whether a worker takes such requests, by what it is dedicated to."""
    dedicated = worker.dedicated_artifact_digest
    return not dedicated or (dedicated == request.artifact_digest and not request.beside_base)


def adapter_cost_s(worker: WorkerView, request: PlacementRequest) -> float:
    """Return the seconds until the request's adapter is on the worker's device; 0 for the base."""
    if not request.artifact_digest:
        return 0.0
    residency = worker.adapters.get(request.artifact_digest)
    tier = residency.tier if residency is not None else Tier.SOURCE
    if tier is Tier.DEVICE:
        return 0.0
    fixed_s, bytes_per_s = _LOAD_COST[tier]
    cost_s = fixed_s + request.artifact_bytes / bytes_per_s
    under_way = (residency is not None and residency.loading) or request.artifact_digest in worker.own_adapters
    return cost_s * _LOADING_SHARE if under_way else cost_s


def prompt_tokens_on(worker: WorkerView, request: PlacementRequest) -> int:
    """Return the prompt tokens the worker would compute; a prompt beyond its context it refuses at once."""
    if worker.max_context_tokens is None:
        return request.prompt_tokens
    return min(request.prompt_tokens, worker.max_context_tokens)


def expected_s(worker: WorkerView, request: PlacementRequest) -> float:
    """Return the expected time to first token in seconds.

    Prompt tokens ahead and the request's own, at the worker's prefill speed; one decode step of what runs (the step
    in progress ends first); the turn of those who wait; the adapter's way to the device.
    """
    prefill = max(worker.prefill_tokens_per_second, MIN_TOKENS_PER_SECOND)
    decode = max(worker.decode_tokens_per_second, MIN_TOKENS_PER_SECOND)
    tokens = worker.queued_prefill_tokens + worker.own_prompt_tokens + prompt_tokens_on(worker, request)
    running = worker.running_requests + worker.own_requests
    return (
        tokens / prefill
        + running / decode
        + worker.waiting_requests * WAITING_TOKENS / decode
        + adapter_cost_s(worker, request)
    )


def pick(
    request: PlacementRequest,
    workers: Sequence[WorkerView],
    rng: random.Random,
    exclude: Collection[str] = (),
) -> Pick:
    """Choose the worker with the least expected time to first token.

    Workers that are dedicated to the request's adapter go before all others, unless it is expected there more than
    DEDICATED_PATIENCE_S later than elsewhere; those dedicated to another are not considered.
    Workers within max(20 ms, 10 %) of the best tie. Among those, the ones that hold the adapter on their device (or
    are loading it) share at random, but no more of them than the request's `replicas`, the first in rendezvous order:
    so an adapter that is on more devices than it shall be is no longer asked for on some of them. A cold adapter goes
    by rendezvous hash of (artifact digest, worker id), so that routers that know nothing of each other agree where it
    belongs; the base goes at random. Workers that are silent are used only if nothing else is there, and those that
    have the adapter in quarantine only if all have. `exclude` holds worker ids that were tried already.

    Raises NoWorker with the reason.
    """
    usable = [
        worker
        for worker in workers
        if worker.state is State.SERVING
        and worker.base_digest == request.base_digest
        and serves(worker, request)
        and worker.worker_id not in exclude
    ]
    if not usable:
        raise no_worker(request, workers, exclude)
    candidates = [worker for worker in usable if not worker.silent] or usable
    candidates = [worker for worker in candidates if not in_quarantine(worker, request.artifact_digest)] or candidates
    scored = [(expected_s(worker, request), worker) for worker in candidates]
    best_s = min(score for score, _ in scored)
    own = [(score, worker) for score, worker in scored if worker.dedicated_artifact_digest]
    if own and min(score for score, _ in own) <= best_s + DEDICATED_PATIENCE_S:
        scored = own
        best_s = min(score for score, _ in scored)
    limit_s = best_s + max(TIE_S, TIE_RATIO * best_s)
    tied = [Pick(worker, score) for score, worker in scored if score <= limit_s]
    digest = request.artifact_digest
    if digest:
        warm = [choice for choice in tied if is_warm(choice.worker, digest)]
        if not warm:
            return max(tied, key=lambda choice: rendezvous_weight(digest, choice.worker.worker_id))
        if 0 < request.replicas < len(warm):
            warm.sort(key=lambda choice: rendezvous_weight(digest, choice.worker.worker_id), reverse=True)
            del warm[request.replicas :]
        tied = warm
    return rng.choice(tied)


@functools.lru_cache(maxsize=32_768)
def rendezvous_weight(digest: str, worker_id: str) -> int:
    """Return the weight of a worker for an adapter; the worker with the greatest is where the adapter belongs."""
    joined = f"{digest}\0{worker_id}".encode()
    return int.from_bytes(hashlib.blake2b(joined, digest_size=8).digest(), "big")


def is_warm(worker: WorkerView, digest: str) -> bool:
    """Tell whether an artifact is on the worker's device, or on its way there."""
    residency = worker.adapters.get(digest)
    return digest in worker.own_adapters or (
        residency is not None and (residency.tier is Tier.DEVICE or residency.loading)
    )


def in_quarantine(worker: WorkerView, digest: str) -> bool:
    """Tell whether a worker refuses an artifact for now; it tells itself when that has ended."""
    residency = worker.adapters.get(digest)
    return residency is not None and bool(residency.quarantine_reason)


def homes(base_digest: str, artifact_digest: str, workers: Sequence[WorkerView]) -> list[WorkerView]:
    """Return the workers that an adapter's requests would go to if all were idle, first ones first.

    Those that have it on their device, or are loading it, come first, then the others, and last those that have it in
    quarantine; each in rendezvous order. Dedicated ones are none: what they have is what they started with, and nothing
    is brought there.
    """
    usable = [
        worker
        for worker in workers
        if worker.state is State.SERVING and worker.base_digest == base_digest and not worker.dedicated_artifact_digest
    ]
    candidates = [worker for worker in usable if not worker.silent] or usable
    return sorted(
        candidates,
        key=lambda worker: (
            not in_quarantine(worker, artifact_digest),
            is_warm(worker, artifact_digest),
            rendezvous_weight(artifact_digest, worker.worker_id),
        ),
        reverse=True,
    )


def no_worker(request: PlacementRequest, workers: Sequence[WorkerView], exclude: Collection[str]) -> NoWorker:
    """Return why no worker can be had for a request, as an error."""
    reachable = [worker for worker in workers if worker.state is not State.UNREACHABLE]
    if not workers:
        return NoWorker("no worker is known; check the router's --workers", why="none_known", retry_after_s=1.0)
    if not reachable:
        return NoWorker(
            f"none of the {len(workers)} known workers is reachable", why="none_reachable", retry_after_s=1.0
        )
    right = [worker for worker in reachable if worker.base_digest == request.base_digest]
    if not right:
        if any(not worker.base_digest for worker in reachable):
            return NoWorker("the workers are starting", why="starting", retry_after_s=2.0)
        held = ", ".join(sorted({worker.base_digest[:12] for worker in reachable}))
        return NoWorker(
            f"no reachable worker has base model {request.base_digest[:12]}; they have {held}",
            why="no_such_base",
            base_digest=request.base_digest,
        )
    right = [worker for worker in right if serves(worker, request)]
    if not right:
        return NoWorker(
            "all workers with this base model are dedicated to other adapters; start one that is not",
            why="dedicated",
            retry_after_s=1.0,
        )
    left = [worker for worker in right if worker.worker_id not in exclude]
    if not left:
        return NoWorker("no other worker has this base model", why="none_left", retry_after_s=1.0)
    states = {worker.state for worker in left}
    if states == {State.DRAINING}:
        return NoWorker("all workers with this base model are draining", why="draining", retry_after_s=1.0)
    if states == {State.STARTING}:
        return NoWorker("the workers with this base model are starting", why="starting", retry_after_s=2.0)
    described = ", ".join(f"{worker.worker_id} {worker.state.value}" for worker in left)
    return NoWorker(
        f"no worker with this base model takes requests now: {described}", why="not_serving", retry_after_s=1.0
    )
