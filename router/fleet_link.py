"""One address where a worker may be: its channel, its status stream, and what this router has in flight there."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

import structlog
from grpc import aio

from common.backoff import Backoff
from common.rpc import open_channel
from loraplex.credentials import Metadata
from loraplex.worker.v1 import worker_pb2, worker_pb2_grpc
from router.fleet_status import WorkerStatus
from router.placement import Residency, State, WorkerView

log = structlog.get_logger(__name__)

SILENT_AFTER_S: Final = 3.0
"""Workers speak at least once a second; one this quiet is used only if nothing else is."""

DEAD_AFTER_S: Final = 15.0
"""A status stream this quiet counts as failed."""

_SMALL_WINDOWS: Final = (("grpc.http2.bdp_probe", 0),)
"""Keeps a stream's window at 64 KiB. gRPC would let it grow with the connection's speed to megabytes, and each client
that does not read would have as much of this router's memory; text needs far less."""

_NOT_REACHED: Final = "not reached yet"

RECONNECT: Final = Backoff(first_s=0.1, longest_s=1.0)


@dataclass(slots=True, eq=False)
class Flight:
    """One request on its way to or at a worker.

    Until the worker's own status counts it, it is added to what the worker reports, so that a burst neither herds
    onto one worker nor is counted twice.
    """

    _link: Link
    prompt_tokens: int
    artifact_digest: str
    counted_from: int | None = field(default=None)

    def accepted(self, sequence: int | None) -> None:
        """Note the status sequence that first counts this request; None where the worker did not say."""
        self.counted_from = 0 if sequence is None else sequence
        self._link.settle()

    def end(self) -> None:
        """Note that the request is over, in whatever way. May be called again."""
        self._link.land(self)


def _identity(status: WorkerStatus) -> tuple[object, ...]:
    return status.worker_id, status.epoch, status.state, status.base_digest


def _without_counters(residency: Residency | None) -> Residency | None:
    return None if residency is None else replace(residency, in_flight=0)


class Link:
    """Follows one address until it is no longer wanted. `clock` returns monotonic seconds.

    `on_change` is called when another worker, epoch, state or residency is there than before.
    """

    def __init__(
        self,
        address: str,
        *,
        credentials: Metadata = (),
        clock: Callable[[], float],
        rng: random.Random,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.address = address
        self._credentials = credentials
        self._clock = clock
        self._channel = open_channel(address, _SMALL_WINDOWS)
        self.stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self._rng = rng
        self._on_change = on_change
        self._failures = 0
        self.status = WorkerStatus()
        self.connected = False
        self.error = _NOT_REACHED
        self._heard_s = clock()
        self._uncounted: set[Flight] = set()
        self._flights: set[Flight] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    async def run(self, is_wanted: Callable[[str], bool]) -> None:
        """Keep a status stream open; return once it has ended and the address is not wanted any more.

        The channel closes after the last request on it.
        """
        try:
            while True:
                self._lost(await self._follow())
                if not is_wanted(self.address):
                    break
                self._failures += 1
                await asyncio.sleep(RECONNECT.jittered_s(self._failures, self._rng))
            await self._idle.wait()
        finally:
            self.connected = False
            await self._channel.close()

    async def _follow(self) -> str:
        """Read one status stream to its end. Returns why it ended."""
        call = self.stub.WatchStatus(worker_pb2.WatchStatusRequest(), metadata=self._credentials)
        stream = aiter(call)
        try:
            while True:
                async with asyncio.timeout(DEAD_AFTER_S):
                    message = await anext(stream, None)
                if message is None:
                    return "the worker ended its status stream"
                self._heard(message)
        except aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        except TimeoutError:
            return f"no status for {DEAD_AFTER_S:g} s"
        finally:
            call.cancel()

    def _heard(self, message: worker_pb2.WatchStatusResponse) -> None:
        self._heard_s = self._clock()
        before = self.status
        self.status = before.merged(message)
        if not self.connected or self._has_changed(before, message):
            self._on_change()
        if not self.connected:
            self.connected, self.error = True, ""
            if self.status.state is not State.DRAINING:  # a draining worker ends each stream it is asked for
                self._failures = 0
            log.info(
                "fleet.worker_found",
                address=self.address,
                worker_id=self.status.worker_id,
                state=self.status.state.value,
                base=self.status.base_digest[:12],
            )
        elif self.status.state is not before.state:
            log.info("fleet.worker_state", worker_id=self.status.worker_id, state=self.status.state.value)
        self.settle()

    def _has_changed(self, before: WorkerStatus, message: worker_pb2.WatchStatusResponse) -> bool:
        """Tell whether more than counters has: another epoch or state, an adapter that came, went or moved."""
        return (
            message.full
            or bool(message.removed_artifact_digests)
            or _identity(before) != _identity(self.status)
            or any(
                _without_counters(before.adapters.get(adapter.artifact_digest))
                != _without_counters(self.status.adapters.get(adapter.artifact_digest))
                for adapter in message.adapters
            )
        )

    def _lost(self, why: str) -> None:
        if self.connected or not self.was_tried:
            log.warning("fleet.worker_lost", address=self.address, worker_id=self.status.worker_id, error=why)
            self._on_change()
        self.connected, self.error = False, why

    @property
    def was_tried(self) -> bool:
        """Whether it is known by now if there is a worker."""
        return self.error != _NOT_REACHED

    def begin(self, prompt_tokens: int, artifact_digest: str) -> Flight:
        """Note that a request goes to this worker."""
        flight = Flight(self, prompt_tokens, artifact_digest)
        self._flights.add(flight)
        self._uncounted.add(flight)
        self._idle.clear()
        return flight

    def settle(self) -> None:
        """Let go of the flights that the worker's status counts by now."""
        sequence = self.status.sequence
        self._uncounted = {
            flight for flight in self._uncounted if flight.counted_from is None or flight.counted_from > sequence
        }

    @property
    def num_flights(self) -> int:
        """Requests that this router has there now."""
        return len(self._flights)

    def land(self, flight: Flight) -> None:
        """Forget a flight."""
        self._flights.discard(flight)
        self._uncounted.discard(flight)
        if not self._flights:
            self._idle.set()

    def view(self) -> WorkerView:
        """Return what is known of the worker now."""
        status = self.status
        age_s = self._clock() - self._heard_s
        return WorkerView(
            address=self.address,
            state=status.state if self.connected else State.UNREACHABLE,
            worker_id=status.worker_id,
            epoch=status.epoch,
            base_digest=status.base_digest,
            running_requests=status.running_requests,
            waiting_requests=status.waiting_requests,
            queued_prefill_tokens=status.queued_prefill_tokens,
            prefill_tokens_per_second=status.prefill_tokens_per_second,
            decode_tokens_per_second=status.decode_tokens_per_second,
            adapters=status.adapters,
            silent=age_s > SILENT_AFTER_S,
            own_requests=len(self._uncounted),
            own_prompt_tokens=sum(flight.prompt_tokens for flight in self._uncounted),
            own_adapters=frozenset(flight.artifact_digest for flight in self._uncounted if flight.artifact_digest),
            max_context_tokens=status.max_context_tokens,
            free_blocks=status.free_blocks,
            total_blocks=status.total_blocks,
            status_age_s=age_s,
            error=self.error,
            device=status.device,
            dtype=status.dtype,
            base_quantization=status.base_quantization,
            device_tier=status.device_tier,
            host_tier=status.host_tier,
            disk_tier=status.disk_tier,
            dedicated_artifact_digest=status.dedicated_artifact_digest,
        )
