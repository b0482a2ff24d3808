"""Has a worker evaluate an adapter and relays what it tells.

Another worker is tried while none has told anything yet. Stores nothing; knows no names.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Final

import structlog
from grpc import aio

from loraplex.errors import DeadlineExceeded, LoraplexError, NoWorker
from loraplex.router.v1 import fleet_pb2
from loraplex.worker.v1 import worker_pb2
from router.fleet import Fleet
from router.forward import is_retryable
from router.placement import PlacementRequest, pick
from router.worker_errors import worker_error, worker_lost

log = structlog.get_logger(__name__)

EVALUATION_TIMEOUT_S: Final = 600.0
"""For callers without a deadline."""
_MAX_ATTEMPTS: Final = 2

Call = aio.UnaryStreamCall[worker_pb2.EvaluateAdapterRequest, worker_pb2.EvaluateAdapterResponse]


class Evaluations:
    """The evaluations that this router has at workers. `clock` returns monotonic seconds."""

    def __init__(
        self, fleet: Fleet, *, rng: random.Random | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._fleet = fleet
        self._rng = rng or random.Random()  # noqa: S311 - breaks ties, guards nothing
        self._clock = clock
        self._calls: set[Call] = set()
        self._cut: LoraplexError | None = None

    def cut_all(self, error: LoraplexError) -> None:
        """End every evaluation with `error`, and let none begin any more."""
        self._cut = error
        for call in list(self._calls):
            call.cancel()

    async def run(
        self, request: fleet_pb2.EvaluateAdapterRequest, timeout_s: float
    ) -> AsyncGenerator[fleet_pb2.EvaluateAdapterResponse, None]:
        """Yield a worker's events within `timeout_s`.

        Raises NoWorker, DeadlineExceeded, WorkerLost, and what the worker refuses with.
        """
        deadline_s = self._clock() + timeout_s
        placement = PlacementRequest(request.base_digest, 0, request.artifact_digest)
        asked = worker_pb2.EvaluateAdapterRequest(
            base_digest=request.base_digest,
            version_digest=request.version_digest,
            artifact_digest=request.artifact_digest,
            exact_artifact_digest=request.exact_artifact_digest,
        )
        tried: list[str] = []
        failure: LoraplexError | None = None
        while True:
            try:
                views = self._fleet.views()
                shared = [view for view in views if not view.dedicated_artifact_digest]  # that have the base itself
                asked_for = placement if shared else PlacementRequest(request.base_digest, 0)
                worker = pick(asked_for, shared or views, self._rng, tried).worker
            except NoWorker:
                if failure is not None:
                    raise failure from None
                raise
            has_started = False
            try:
                async with aclosing(self._ask(worker.address, worker.worker_id, asked, deadline_s)) as events:
                    async for event in events:
                        has_started = True
                        yield event
            except LoraplexError as error:
                tried.append(worker.worker_id)
                if has_started or not is_retryable(error) or len(tried) == _MAX_ATTEMPTS or self._cut is not None:
                    raise
                failure = error
                log.warning("evaluation.retry", worker_id=worker.worker_id, reason=error.reason, error=str(error))
            else:
                return

    async def _ask(
        self, address: str, worker_id: str, request: worker_pb2.EvaluateAdapterRequest, deadline_s: float
    ) -> AsyncGenerator[fleet_pb2.EvaluateAdapterResponse, None]:
        if self._cut is not None:
            raise self._cut
        remaining_s = deadline_s - self._clock()
        if remaining_s <= 0:
            raise DeadlineExceeded("the deadline passed before a worker could evaluate; give it more time")
        flight = self._fleet.begin(address, 0, request.artifact_digest)
        call: Any = self._fleet.stub(address).EvaluateAdapter(
            request, timeout=remaining_s, metadata=self._fleet.credentials
        )
        self._calls.add(call)
        has_started = is_complete = False
        try:
            await call.initial_metadata()
            flight.accepted(None)
            async for event in call:
                has_started = True
                if event.HasField("progress"):
                    yield fleet_pb2.EvaluateAdapterResponse(progress=event.progress)
                elif event.HasField("evaluation"):
                    is_complete = True
                    yield fleet_pb2.EvaluateAdapterResponse(evaluation=event.evaluation)
            if not is_complete:
                raise worker_lost(worker_id, "the stream ended early", has_started=has_started)
        except aio.AioRpcError as error:
            raise self._cut or worker_error(error, worker_id, has_started=has_started) from None
        except asyncio.CancelledError:
            if self._cut is None:
                raise
            raise self._cut from None
        finally:
            flight.end()
            call.cancel()
            self._calls.discard(call)
