"""The RPCs that steer a worker's adapters: LoadAdapter, PrefetchAdapter, UnloadAdapter, PinAdapter.

From messages to `Steering` and back; every field is checked as Generate checks its own. All four may be called again.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from typing import Any

from grpc import aio

from loraplex.errors import DeadlineExceeded, InvalidRequest
from loraplex.worker.v1.worker_pb2 import (
    LoadAdapterRequest,
    LoadAdapterResponse,
    PinAdapterRequest,
    PinAdapterResponse,
    PrefetchAdapterRequest,
    PrefetchAdapterResponse,
    UnloadAdapterRequest,
    UnloadAdapterResponse,
)
from loraplex.worker.v1.worker_pb2_grpc import WorkerServiceServicer
from worker.adapters.steering import Steering
from worker.deadline import time_to_wait
from worker.dedicated import Dedication
from worker.messages import TIERS
from worker.requests import CheckedAdapter, check_adapter, check_base, check_digest
from worker.status import Tier


class AdapterService(WorkerServiceServicer, ABC):
    """The part of the service that is about adapters alone.

    A worker that is dedicated to an adapter has it already, merged, and for good; it takes no other.
    """

    def __init__(self, steering: Steering, max_rank: int | None, dedication: Dedication | None) -> None:
        self._steering = steering
        self._max_rank = max_rank
        self._dedication = dedication

    @abstractmethod
    def _served_base(self) -> str:
        """Return the digest of the base that is served. Raises Draining, or EngineDown while nothing is."""

    async def LoadAdapter(  # noqa: N802 - gRPC's name
        self, request: LoadAdapterRequest, context: aio.ServicerContext[LoadAdapterRequest, LoadAdapterResponse]
    ) -> LoadAdapterResponse:
        """Bring an adapter to the device and answer when it is there."""
        adapter = self._checked(request)
        tier, seconds = Tier.DEVICE, 0.0
        if self._dedication is None:
            tier, seconds = await self._steering.load(adapter, _remaining(context))
        response = LoadAdapterResponse(tier_hit=TIERS[tier])
        response.load_time.FromNanoseconds(int(seconds * 1e9))
        return response

    async def PrefetchAdapter(  # noqa: N802 - gRPC's name
        self,
        request: PrefetchAdapterRequest,
        context: aio.ServicerContext[PrefetchAdapterRequest, PrefetchAdapterResponse],
    ) -> PrefetchAdapterResponse:
        """Start to bring an adapter to the disk or the device, and answer at once."""
        del context
        adapter = self._checked(request)
        if self._dedication is not None:
            return PrefetchAdapterResponse(tier=TIERS[Tier.DEVICE])
        tier = self._steering.prefetch(adapter, to_device=request.to_device, for_request=request.for_request)
        return PrefetchAdapterResponse(tier=TIERS[tier])

    async def UnloadAdapter(  # noqa: N802 - gRPC's name
        self, request: UnloadAdapterRequest, context: aio.ServicerContext[UnloadAdapterRequest, UnloadAdapterResponse]
    ) -> UnloadAdapterResponse:
        """Take an adapter that nobody uses off the device."""
        self._served_base()
        check_digest("artifact_digest", request.artifact_digest)
        if self._dedication is not None:
            self._dedication.check_unload(request.artifact_digest)
        remaining_s = _remaining(context)
        work = self._steering.unload(request.artifact_digest, from_disk=request.from_disk)
        tier = await _in_time(work, remaining_s)
        return UnloadAdapterResponse() if tier is None else UnloadAdapterResponse(tier=TIERS[tier])

    async def PinAdapter(  # noqa: N802 - gRPC's name
        self, request: PinAdapterRequest, context: aio.ServicerContext[PinAdapterRequest, PinAdapterResponse]
    ) -> PinAdapterResponse:
        """Keep an adapter whatever the demand, or no longer."""
        adapter = self._checked(request)
        if self._dedication is not None:
            return PinAdapterResponse(tier=TIERS[Tier.DEVICE])
        remaining_s = _remaining(context)
        work: Awaitable[Tier | None]
        if request.pinned:
            work = self._steering.pin(adapter, request.adapter.artifact_bytes)
        else:
            work = self._steering.unpin(adapter.artifact_digest)
        tier = await _in_time(work, remaining_s)
        return PinAdapterResponse(tier=TIERS[tier or Tier.SOURCE])

    def _checked(self, request: LoadAdapterRequest | PrefetchAdapterRequest | PinAdapterRequest) -> CheckedAdapter:
        base_digest = self._served_base()
        check_base(request.base_digest, base_digest)
        if not request.HasField("adapter"):
            raise InvalidRequest("the request names no adapter; give its digests", field="adapter")
        adapter = check_adapter(request.adapter, self._max_rank)
        if self._dedication is not None:
            self._dedication.check(adapter.artifact_digest)
        return adapter


def _remaining(context: aio.ServicerContext[Any, Any]) -> float | None:
    """Return the seconds left to the caller's deadline, None without one. Raises DeadlineExceeded."""
    left_s = context.time_remaining()
    if left_s is not None and left_s <= 0:
        raise DeadlineExceeded("the deadline passed before the request was read")
    return left_s


async def _in_time(work: Awaitable[Tier | None], remaining_s: float | None) -> Tier | None:
    """Wait for work that is short, unless the engine is busy. Raises DeadlineExceeded."""
    try:
        async with asyncio.timeout(None if remaining_s is None else time_to_wait(remaining_s)):
            return await work
    except TimeoutError:
        raise DeadlineExceeded("the engine did not come to it before the deadline; try again with more time") from None
