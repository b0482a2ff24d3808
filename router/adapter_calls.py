"""Operators' calls that say where an adapter shall be: which workers they go to, and what became of them there.

Stores nothing and tries nothing twice; what operators want for good is a pin.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from common.tenancy import DEFAULT_TENANT
from common.wording import listing, shown
from loraplex.errors import InvalidParameter, LoraplexError, NotFound
from loraplex.router.v1 import fleet_pb2
from loraplex.types.v1 import generation_pb2
from loraplex.worker.v1 import worker_pb2
from router.catalog import CatalogSnapshot, Version
from router.fleet import Fleet
from router.forward import to_worker_adapter
from router.placement import PlacementRequest, State, WorkerView, homes, no_worker
from router.worker_calls import answer_of

TIMEOUT_S: Final = 60.0
"""For callers without a deadline."""

_Ask = Callable[[Any, dict[str, Any]], Any]  # of a worker's stub, whose type only the stubs' hints know


class AdapterCalls:
    """Sends operators' calls to workers."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def prefetch(
        self, request: fleet_pb2.PrefetchAdapterRequest, snapshot: CatalogSnapshot, timeout_s: float | None
    ) -> list[fleet_pb2.AdapterOutcome]:
        """Have workers fetch an adapter. Raises ModelNotFound, NotFound, NoWorker, or what all workers refuse with."""
        version = _version(snapshot, request.name)
        workers = self._for_requests(version, request.worker_id, request.num_workers)
        wanted = worker_pb2.PrefetchAdapterRequest(
            base_digest=version.base_digest, adapter=to_worker_adapter(version), to_device=request.to_device
        )
        return await self._ask_all(workers, lambda stub, options: stub.PrefetchAdapter(wanted, **options), timeout_s)

    async def load(
        self, request: fleet_pb2.LoadAdapterRequest, snapshot: CatalogSnapshot, timeout_s: float | None
    ) -> list[fleet_pb2.AdapterOutcome]:
        """Have workers load an adapter, and wait for it. Raises as `prefetch` does."""
        version = _version(snapshot, request.name)
        workers = self._for_requests(version, request.worker_id, request.num_workers)
        wanted = worker_pb2.LoadAdapterRequest(base_digest=version.base_digest, adapter=to_worker_adapter(version))
        return await self._ask_all(workers, lambda stub, options: stub.LoadAdapter(wanted, **options), timeout_s)

    async def unload(
        self, request: fleet_pb2.UnloadAdapterRequest, snapshot: CatalogSnapshot, timeout_s: float | None
    ) -> list[fleet_pb2.AdapterOutcome]:
        """Have workers let go of an adapter; all that hold it, unless one is named. Raises as `prefetch` does.

        All of its base are asked, since what a worker has just loaded may not have been told yet.
        """
        version = _version(snapshot, request.name)
        views = self._fleet.views()
        if request.worker_id:
            workers: Sequence[WorkerView] = [_named(request.worker_id, views)]
        else:
            workers = [
                view
                for view in views
                if view.state is not State.UNREACHABLE
                and view.base_digest == version.base_digest
                and not view.dedicated_artifact_digest
            ]
        wanted = worker_pb2.UnloadAdapterRequest(artifact_digest=version.artifact_digest, from_disk=request.from_disk)
        outcomes = await self._ask_all(workers, lambda stub, options: stub.UnloadAdapter(wanted, **options), timeout_s)
        return [outcome for outcome in outcomes if request.worker_id or outcome.tier or outcome.error_reason]

    def _for_requests(self, version: Version, worker_id: str, num_workers: int) -> Sequence[WorkerView]:
        views = self._fleet.views()
        if worker_id:
            return [_named(worker_id, views)]
        chosen = homes(version.base_digest, version.artifact_digest, views)[: num_workers or 1]
        if not chosen:
            request = PlacementRequest(version.base_digest, 0, version.artifact_digest, beside_base=True)
            raise no_worker(request, views, ())
        return chosen

    async def _ask_all(
        self, workers: Sequence[WorkerView], ask: _Ask, timeout_s: float | None
    ) -> list[fleet_pb2.AdapterOutcome]:
        options = {"timeout": TIMEOUT_S if timeout_s is None else timeout_s, "metadata": self._fleet.credentials}
        calls = [ask(self._fleet.stub(worker.address), options) for worker in workers]
        async with asyncio.TaskGroup() as tasks:
            asked = [
                tasks.create_task(_outcome(call, worker.worker_id)) for call, worker in zip(calls, workers, strict=True)
            ]
        results = [task.result() for task in asked]
        refusals = [error for _, error in results if error is not None]
        if refusals and len(refusals) == len(results):
            raise refusals[0]
        return [outcome for outcome, _ in results]


async def _outcome(call: Any, worker_id: str) -> tuple[fleet_pb2.AdapterOutcome, LoraplexError | None]:
    try:
        answer = await answer_of(call, worker_id)
    except LoraplexError as error:
        return fleet_pb2.AdapterOutcome(worker_id=worker_id, error_reason=error.reason, error=error.message), error
    outcome = fleet_pb2.AdapterOutcome(worker_id=worker_id)
    if isinstance(answer, worker_pb2.LoadAdapterResponse):
        outcome.tier = answer.tier_hit
        outcome.load_time.CopyFrom(answer.load_time)
    else:
        outcome.tier = generation_pb2.AdapterTier.ValueType(answer.tier)
    return outcome, None


def _version(snapshot: CatalogSnapshot, name: str) -> Version:
    version = snapshot.resolve(DEFAULT_TENANT, name).version
    if version is None:
        raise InvalidParameter(f"{name} is a base model; name an adapter", field="name")
    return version


def _named(worker_id: str, views: Sequence[WorkerView]) -> WorkerView:
    for view in views:
        if view.worker_id == worker_id:
            return view
    known = listing({view.worker_id for view in views if view.worker_id}) or "none"
    raise NotFound(
        f"this router knows no worker {shown(worker_id)}; it knows {known}", field="worker_id", worker_id=worker_id
    )
