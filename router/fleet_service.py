"""FleetService: what this router knows of its workers, and what operators have it tell them."""
# ruff: noqa: N802 - the names are the RPCs'

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import Any, Final

from grpc import aio

from common.pages import page_of
from loraplex.router.v1 import fleet_pb2, fleet_pb2_grpc
from loraplex.types.v1 import generation_pb2
from router.access import Access
from router.adapter_calls import AdapterCalls
from router.advice import Advice, AdviceKind, about_pins, advise
from router.catalog import Catalog
from router.demand import AdapterKey
from router.evaluation import EVALUATION_TIMEOUT_S, Evaluations
from router.fleet import Fleet
from router.placement import Residency, TierUse, WorkerView
from router.service import authorization, min_revision
from router.steering import Steering
from router.traffic import Traffic

_ADVICE_KINDS: Final = {
    AdviceKind.PROMOTE: fleet_pb2.ADVICE_KIND_PROMOTE,
    AdviceKind.THROTTLE: fleet_pb2.ADVICE_KIND_THROTTLE,
    AdviceKind.MERGE: fleet_pb2.ADVICE_KIND_MERGE,
    AdviceKind.UNMET_PIN: fleet_pb2.ADVICE_KIND_UNMET_PIN,
}


class FleetService(fleet_pb2_grpc.FleetServiceServicer):
    """For operators; each call is served by the module that owns it."""

    def __init__(
        self,
        fleet: Fleet,
        catalog: Catalog,
        access: Access,
        evaluations: Evaluations,
        adapter_calls: AdapterCalls,
        traffic: Traffic,
        steering: Steering,
        *,
        promote_rate: float,
    ) -> None:
        self._fleet = fleet
        self._catalog = catalog
        self._access = access
        self._evaluations = evaluations
        self._adapter_calls = adapter_calls
        self._traffic = traffic
        self._steering = steering
        self._promote_rate = promote_rate

    async def ListAdvice(
        self, request: fleet_pb2.ListAdviceRequest, context: aio.ServicerContext[Any, Any]
    ) -> fleet_pb2.ListAdviceResponse:
        """Tell what the traffic suggests, and where pins are not kept."""
        self._access.operator(authorization(context))
        adapters = self._catalog.snapshot.adapters.values()
        pinned = {AdapterKey(adapter.tenant, adapter.name) for adapter in adapters if adapter.pin_replicas}
        demands, on_workers = self._traffic.now()
        for view in self._fleet.views():
            if view.dedicated_artifact_digest:
                on_workers.pop(view.worker_id, None)  # what is advised of a worker is done there
        found = (
            *about_pins(adapters, self._steering.unmet_pins()),
            *advise(demands, on_workers, pinned, self._promote_rate),
        )
        numbered = [(f"{number:04}", advice) for number, advice in enumerate(found)]
        page, token = page_of("advice", numbered, lambda entry: entry[0], request.page_size, request.page_token)
        return fleet_pb2.ListAdviceResponse(advice=[to_advice(advice) for _, advice in page], next_page_token=token)

    async def PrefetchAdapter(
        self, request: fleet_pb2.PrefetchAdapterRequest, context: aio.ServicerContext[Any, Any]
    ) -> fleet_pb2.PrefetchAdapterResponse:
        """Have workers fetch an adapter."""
        self._access.operator(authorization(context))
        snapshot = await self._catalog.at_least(min_revision(context))
        outcomes = await self._adapter_calls.prefetch(request, snapshot, context.time_remaining())
        return fleet_pb2.PrefetchAdapterResponse(outcomes=outcomes)

    async def LoadAdapter(
        self, request: fleet_pb2.LoadAdapterRequest, context: aio.ServicerContext[Any, Any]
    ) -> fleet_pb2.LoadAdapterResponse:
        """Have workers load an adapter."""
        self._access.operator(authorization(context))
        snapshot = await self._catalog.at_least(min_revision(context))
        outcomes = await self._adapter_calls.load(request, snapshot, context.time_remaining())
        return fleet_pb2.LoadAdapterResponse(outcomes=outcomes)

    async def UnloadAdapter(
        self, request: fleet_pb2.UnloadAdapterRequest, context: aio.ServicerContext[Any, Any]
    ) -> fleet_pb2.UnloadAdapterResponse:
        """Have workers let go of an adapter."""
        self._access.operator(authorization(context))
        snapshot = await self._catalog.at_least(min_revision(context))
        outcomes = await self._adapter_calls.unload(request, snapshot, context.time_remaining())
        return fleet_pb2.UnloadAdapterResponse(outcomes=outcomes)

    async def EvaluateAdapter(
        self, request: fleet_pb2.EvaluateAdapterRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[fleet_pb2.EvaluateAdapterResponse]:
        """Relay one evaluation from a worker."""
        self._access.operator(authorization(context))
        remaining_s = context.time_remaining()
        timeout_s = EVALUATION_TIMEOUT_S if remaining_s is None else remaining_s
        async with aclosing(self._evaluations.run(request, timeout_s)) as events:
            async for event in events:
                yield event

    async def ListWorkers(
        self,
        request: fleet_pb2.ListWorkersRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> fleet_pb2.ListWorkersResponse:
        """List the workers by id."""
        self._access.operator(authorization(context))
        views = sorted(self._fleet.views(), key=_worker_key)
        page, token = page_of("workers", views, _worker_key, request.page_size, request.page_token)
        names: dict[str, list[str]] = {}
        for adapter in self._catalog.snapshot.adapters.values():
            names.setdefault(adapter.current.artifact_digest, []).append(adapter.name)
        return fleet_pb2.ListWorkersResponse(workers=[to_worker(view, names) for view in page], next_page_token=token)


def _worker_key(view: WorkerView) -> str:
    return f"{view.worker_id} {view.address}"


def to_advice(advice: Advice) -> fleet_pb2.Advice:
    """Return advice as clients get it."""
    return fleet_pb2.Advice(
        kind=_ADVICE_KINDS[advice.kind],
        tenant=advice.tenant,
        adapter=advice.adapter,
        worker_id=advice.worker_id,
        figures=[fleet_pb2.AdviceFigure(name=name, value=value) for name, value in advice.figures.items()],
        reason=advice.reason,
    )


def to_worker(view: WorkerView, names: Mapping[str, Sequence[str]]) -> fleet_pb2.Worker:
    """Return what a listing says of a worker; `names` maps artifact digests to adapter names."""
    adapters = [
        _adapter_message(digest, residency, names.get(digest, ()))
        for digest, residency in sorted(view.adapters.items())
    ]
    worker = fleet_pb2.Worker(
        worker_id=view.worker_id,
        address=view.address,
        state=view.state.value,
        epoch=view.epoch,
        base_digest=view.base_digest,
        running_requests=view.running_requests,
        waiting_requests=view.waiting_requests,
        queued_prefill_tokens=view.queued_prefill_tokens,
        prefill_tokens_per_second=view.prefill_tokens_per_second,
        decode_tokens_per_second=view.decode_tokens_per_second,
        free_blocks=view.free_blocks,
        total_blocks=view.total_blocks,
        adapters=adapters,
        error=view.error,
        device=view.device,
        dtype=view.dtype,
        base_quantization=view.base_quantization,
        device_tier=_tier_message(view.device_tier),
        host_tier=_tier_message(view.host_tier),
        disk_tier=_tier_message(view.disk_tier),
        dedicated_artifact_digest=view.dedicated_artifact_digest,
    )
    worker.status_age.FromNanoseconds(int(view.status_age_s * 1e9))
    return worker


def _adapter_message(digest: str, residency: Residency, names: Sequence[str]) -> fleet_pb2.WorkerAdapter:
    message = fleet_pb2.WorkerAdapter(
        artifact_digest=digest,
        names=sorted(names),
        tier=generation_pb2.AdapterTier.ValueType(residency.tier),
        loading=residency.loading,
        in_flight=residency.in_flight,
        pinned=residency.pinned,
        artifact_bytes=residency.artifact_bytes,
        quarantine_reason=residency.quarantine_reason,
    )
    if residency.quarantine_reason:
        message.quarantine_end_time.FromNanoseconds(int(residency.quarantine_end_s * 1e9))
    return message


def _tier_message(use: TierUse | None) -> fleet_pb2.TierUse | None:
    if use is None:
        return None
    return fleet_pb2.TierUse(**asdict(use))
