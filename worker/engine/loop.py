"""The engine's loop: drain the inbox, schedule, start, update, tell. One thread; it waits in the inbox and for steps.

Owns the order of these and nothing else: decisions are the scheduler's, the device is the runner's. With asynchronous
scheduling a step is started before the one before it is answered, so that the device never waits for the loop.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from worker.engine.in_flight import MAX_IN_FLIGHT
from worker.engine.inbox import Inbox, MailboxClosed
from worker.engine.loader import Loader
from worker.engine.plan import AdapterLoad, Runner, StartedStep, StepPlan, StepResult
from worker.engine.refusal import NOT_FINITE, STEP_FAILED, Problem
from worker.engine.residency import Placement
from worker.engine.scheduler import Scheduler
from worker.mailbox import (
    Abort,
    Compare,
    Compared,
    EngineStatus,
    FailedLoad,
    Failure,
    Load,
    Output,
    Pin,
    Provide,
    Shutdown,
    Steered,
    Step,
    Submit,
    ToEngine,
    Unload,
    Unpin,
)

MAX_FAILED_STEPS: Final = 3
"""Steps in a row that may raise before the engine gives up: something is wrong with more than one request."""

GRACE_S: Final = 0.004
"""How long a step waits for loads that are about to end."""
_FORGET: Final = 1.2

log = structlog.get_logger(__name__)


class EngineBroken(Exception):
    """The runner failed too many steps in a row; the process should end and be started anew."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    plan: StepPlan
    step: StartedStep
    started_s: float


@dataclass(frozen=True, slots=True)
class _NotStarted:
    """Stands for a step that could not be started; see StartedStep."""

    error: Exception

    def result(self) -> StepResult:
        raise self.error


class EngineLoop:
    """Runs until the front end says so or is gone."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        inbox: Inbox,
        loader: Loader,
        *,
        describe: Callable[[Exception], Problem],
        async_scheduling: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`describe` gives the words for what a load raised: the error tree is not the engine's to know.

        `async_scheduling` plans the next step while one runs.
        """
        self._runner = runner
        self._scheduler = scheduler
        self._inbox = inbox
        self._loader = loader
        self._describe = describe
        self._clock = clock
        self._max_in_flight = MAX_IN_FLIGHT if async_scheduling else 1
        self._in_flight: deque[_InFlight] = deque()
        self._counted_s = 0.0  # up to here time was a step's, or a wait
        self._answered_step = 0
        self._failures: list[Failure] = []
        self._failed_loads: list[FailedLoad] = []
        self._wanted: tuple[int, ...] = ()
        self._host_unloads: dict[int, str] = {}  # orders after which a copy in the host tier leaves too
        self._host: dict[str, bool] = {}  # whether it is in the host tier, for those that are to be told
        self._compared: list[Compared] = []
        self._quick_load_s = math.inf
        self._told: EngineStatus | None = None
        self._failed_steps = 0

    def run(self) -> None:
        """Serve until Shutdown or the mailbox's end. Raises EngineBroken, or MailboxBroken on a protocol error."""
        try:
            self._tell([])
            idle = True
            while True:
                wait = idle or self._inbox.congested
                for message in self._inbox.receive(timeout_s=None if wait else 0):
                    if isinstance(message, Shutdown):
                        return
                    self._take(message)
                if wait:
                    self._counted_s = self._clock()  # a step in flight did not take all that time
                idle = self._turn()
        except MailboxClosed as closed:
            log.info("engine.mailbox_closed", how=str(closed))

    def _take(self, message: ToEngine) -> None:
        match message:
            case Submit():
                failure = self._scheduler.submit(message)
                if failure is not None:
                    self._failures.append(failure)
            case Compare():
                failure = self._scheduler.compare(message)
                if failure is not None:
                    self._failures.append(failure)
            case Provide():
                self._scheduler.provide(message)
            case Load() | Unload() | Pin() | Unpin():
                if isinstance(message, Unload) and message.from_host:
                    self._host_unloads[message.request_id] = message.artifact_digest
                self._scheduler.order(message)
            case Abort():
                self._scheduler.abort(message.request_ids)

    def _turn(self) -> bool:
        """Do all that can be done without waiting, one step at most; returns whether nothing is left to do."""
        self._take_loads()
        self._take_host_changes()
        for slot in self._scheduler.unwanted_loads():
            if self._loader.cancel(slot):
                self._scheduler.load_given_up(slot)
        if self._inbox.congested:
            return True
        self._load_ahead()
        started = self._clock()
        schedule = self._scheduler.schedule(started)
        self._failures += schedule.failures
        self._begin_loads(schedule.evicted_slots, schedule.placements)
        for slot in schedule.hurried_slots:
            self._loader.hurry(slot)
        if schedule.wanted:  # told before the step, which may take longer than the file
            self._wanted = schedule.wanted
            self._tell([])
        if schedule.plan is not None:
            self._in_flight.append(_InFlight(schedule.plan, self._start(schedule.plan), started))
            if len(self._in_flight) < self._max_in_flight:
                return False  # the next one is planned first
        elif not self._in_flight:
            self._tell([])
            # Requests may wait for loads, whose end wakes the inbox; not for what has just been given up.
            return not schedule.failures
        self._answer()
        return False

    def _begin_loads(self, evicted_slots: Iterable[int], placements: Iterable[Placement]) -> None:
        for slot in evicted_slots:
            self._runner.release_adapter(slot)
        for placement in placements:
            self._loader.start(placement.slot, Path(placement.file.path), placement.chunk_ids, placement.urgency)

    def _load_ahead(self) -> None:
        """Begin the loads of new requests, and wait for them where they end so soon that all lose less than one gains.

        A request whose adapter is there when the next step is planned is in it, and not in the one after it.
        """
        evicted_slots, placements = self._scheduler.place_ahead(self._clock())
        self._begin_loads(evicted_slots, placements)
        if placements and self._quick_load_s <= GRACE_S:
            self._loader.wait(GRACE_S)
            self._take_loads()

    def _take_loads(self) -> None:
        for loaded in self._loader.completed():
            # What a load takes at best, slowly forgotten: beside a step it takes longer.
            self._quick_load_s = min(loaded.seconds, self._quick_load_s * _FORGET)
            if isinstance(loaded.outcome, AdapterLoad):
                self._scheduler.adapter_loaded(loaded.slot, loaded.outcome, loaded.seconds, self._clock())
            else:
                log.warning("engine.load_failed", slot=loaded.slot, error=str(loaded.outcome))
                problem = self._describe(loaded.outcome)
                failed_load, failures = self._scheduler.adapter_failed(loaded.slot, problem)
                self._failures += failures
                if failed_load is not None:
                    self._failed_loads.append(failed_load)

    def _take_host_changes(self) -> None:
        changes = self._runner.take_host_changes()
        self._host.update(dict.fromkeys(changes.came, True))
        self._host.update(dict.fromkeys(changes.gone, False))
        self._scheduler.host_changed(changes)

    def _start(self, plan: StepPlan) -> StartedStep:
        try:
            return self._runner.start(plan)
        except Exception as error:  # noqa: BLE001 - told when it is this step's turn to be answered
            return _NotStarted(error)

    def _answer(self) -> None:
        """Wait for the oldest step in flight and tell what came out."""
        error = self._answer_one(self._in_flight.popleft())
        if error is None:
            self._failed_steps = 0
            return
        while self._in_flight:  # it went on from the one that failed: no other may go on from it
            self._answer_one(self._in_flight.popleft())
        self._failed_steps += 1
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise EngineBroken(f"{self._failed_steps} steps in a row failed") from error

    def _answer_one(self, step: _InFlight) -> Exception | None:
        plan, began_s = step.plan, max(step.started_s, self._counted_s)
        outputs: list[Output] = []
        failed: Exception | None = None
        try:
            result = step.step.result()
            now = self._clock()
            outputs = self._take_result(plan, result, now - began_s, now)
        except Exception as error:
            log.exception("engine.step_failed", step=plan.step, requests=len(plan.sequences))
            self._failures += self._scheduler.fail_step(plan, STEP_FAILED)
            failed = error
        self._counted_s, self._answered_step = self._clock(), plan.step
        self._tell(outputs, step_s=self._counted_s - began_s)
        return failed

    def _take_result(self, plan: StepPlan, result: StepResult, seconds: float, now: float) -> list[Output]:
        outputs = self._scheduler.update(plan, result, seconds, now)
        self._compared = self._scheduler.take_compared()
        live = {output.request_id for output in outputs}  # not what ended while the step ran
        live.update(compared.request_id for compared in self._compared)
        if broken := [request_id for request_id in result.broken_request_ids if request_id in live]:
            self._failures += self._scheduler.fail(broken, NOT_FINITE)
            outputs = [output for output in outputs if output.request_id not in broken]
            self._compared = [compared for compared in self._compared if compared.request_id not in broken]
        return outputs

    def _tell(self, outputs: list[Output], *, step_s: float | None = None) -> None:
        """Send one frame after a step, or when something changed without one."""
        steered, failures = self._take_orders_done()
        self._failures += failures
        status, changes = self._scheduler.status(), self._scheduler.take_adapter_changes()
        heard = self._failures or self._failed_loads or steered or changes or self._host or self._wanted
        if step_s is None and not (heard or status != self._told):
            return
        told = (self._answered_step, tuple(outputs), tuple(self._failures), status, changes.adapters, changes.gone)
        more = (tuple(self._compared), tuple(steered), tuple(self._failed_loads), *self._told_of_host())
        self._inbox.send(Step(*told, step_s or 0.0, *more, self._wanted))
        self._failed_loads.clear()
        self._host.clear()
        self._failures.clear()
        self._compared.clear()
        self._wanted = ()
        self._told = status

    def _take_orders_done(self) -> tuple[list[Steered], list[Failure]]:
        """Return the orders done and failed; what is unloaded from the host tier too has left it when that is told."""
        steered, failures = self._scheduler.take_orders_done()
        for failure in failures:
            self._host_unloads.pop(failure.request_id, None)
        for done in steered:
            if (digest := self._host_unloads.pop(done.request_id, None)) is not None:
                self._runner.forget_on_host(digest)
                self._take_host_changes()
        return steered, failures

    def _told_of_host(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        came = tuple([digest for digest, is_there in self._host.items() if is_there])
        return came, tuple([digest for digest, is_there in self._host.items() if not is_there])
