"""What both fronts do with a request: admit it, resolve its model, open a stream to a worker.

Owns admission, the drain and the outcome of each request. Knows neither gRPC servers nor HTTP.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import structlog

from common import tracing
from loraplex.errors import Draining, InvalidParameter, LoraplexError
from loraplex.metadata_keys import REQUEST_ID_KEY
from router.catalog import Catalog, Resolved, parse_min_revision
from router.forward import Forwarder, Job, WorkerStream
from router.metrics import Metrics, Observation
from router.quota import Admission, Limits
from router.traces import describe_request

log = structlog.get_logger(__name__)

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Inference:
    """The router's way from an admitted request to a stream of events. `clock` returns monotonic seconds."""

    def __init__(
        self,
        catalog: Catalog,
        forwarder: Forwarder,
        metrics: Metrics,
        limits: Limits,
        *,
        request_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._catalog = catalog
        self._forwarder = forwarder
        self._metrics = metrics
        self._admission = Admission(limits)
        self._clock = clock
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.request_timeout_s = request_timeout_s

    @contextmanager
    def observed(self, front: str) -> Iterator[Observation]:
        """Measure one request; its end is the exception that leaves, or what the observation was told before."""
        observation = Observation(self._metrics, front)
        try:
            yield observation
        except LoraplexError as error:
            observation.failed(error)
            raise
        except Exception:
            observation.failed(LoraplexError("unexpected"))
            raise
        except BaseException:  # cancelled, or its generator closed
            observation.cancelled()
            raise
        finally:
            observation.end()

    @contextmanager
    def admitted(self, tenant: str, num_requests: int = 1) -> Iterator[None]:
        """Hold places for `num_requests`. Raises Draining and ResourceExhausted."""
        self._refuse_while_draining()
        ticket = self._admission.admit(tenant, num_requests)
        self._idle.clear()
        self._metrics.in_flight.set(self._admission.in_flight)
        try:
            yield
        finally:
            ticket.close()
            self._metrics.in_flight.set(self._admission.in_flight)
            if self._admission.in_flight == 0:
                self._idle.set()

    def _refuse_while_draining(self) -> None:
        if self._is_draining:
            raise Draining("this router is shutting down; try another", retry_after_s=1.0)

    async def resolve(self, tenant: str, model: str, min_revision: str | None) -> Resolved:
        """Resolve a model name in a catalog no older than `min_revision` (as the client wrote it)."""
        with tracing.span("resolve"):
            snapshot = await self._catalog.at_least(parse_min_revision(min_revision))
            resolved = snapshot.resolve(tenant, model)
        describe_request(resolved)
        return resolved

    def deadline_s(self, timeout_s: float | None) -> float:
        """Return the deadline on this object's clock; None takes the default time-out."""
        return self._clock() + (self.request_timeout_s if timeout_s is None else timeout_s)

    async def open(self, job: Job) -> WorkerStream:
        """Return a stream whose first event is there; see Forwarder.open."""
        return await self._forwarder.open(job)

    async def open_all(
        self, jobs: Sequence[Job], told: Callable[[LoraplexError, int], LoraplexError] = lambda error, _: error
    ) -> list[WorkerStream]:
        """Open one stream per job at once. Where one fails, the others are closed and its error is raised.

        `told` puts the error of the job of that number into the client's words.
        """

        async def opened(number: int) -> WorkerStream:
            try:
                return await self.open(jobs[number])
            except LoraplexError as error:
                raise told(error, number) from None

        if len(jobs) == 1:
            return [await opened(0)]
        tasks: list[asyncio.Task[WorkerStream]] = []
        try:
            async with asyncio.TaskGroup() as group:
                tasks.extend(group.create_task(opened(number)) for number in range(len(jobs)))
        except BaseException as error:
            for task in tasks:
                if task.done() and not task.cancelled() and task.exception() is None:
                    task.result().close()
            if isinstance(error, BaseExceptionGroup):
                raise error.exceptions[0] from None
            raise
        return [task.result() for task in tasks]

    def refuse_new(self) -> None:
        """From now on refuse requests with DRAINING."""
        self._is_draining = True

    def cut_all(self) -> None:
        """End what is still in flight with DRAINING."""
        self._forwarder.cut_all(Draining("this router stopped before the answer was complete", retry_after_s=1.0))

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is in flight; tells whether that came in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    @property
    def in_flight(self) -> int:
        """Requests in flight."""
        return self._admission.in_flight


def request_id_from(value: str | None) -> str:
    """Return the client's request id, or a fresh one. Raises InvalidParameter."""
    if not value:
        return uuid.uuid4().hex
    if not _REQUEST_ID.fullmatch(value):
        raise InvalidParameter(
            f"{REQUEST_ID_KEY} must be 1 to 128 printable ASCII characters without spaces", field=REQUEST_ID_KEY
        )
    return value
