"""The engine's loop: drain the inbox, schedule, execute, update, tell. One thread; it waits in the inbox alone.

Owns the order of these and nothing else: decisions are the scheduler's, the device is the runner's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from worker.engine.inbox import Inbox, MailboxClosed
from worker.engine.loader import Loader
from worker.engine.plan import AdapterLoad, Runner, StepPlan
from worker.engine.refusal import NOT_FINITE, STEP_FAILED, Problem
from worker.engine.scheduler import Scheduler
from worker.mailbox import (
    Abort,
    Compare,
    Compared,
    EngineStatus,
    Failure,
    Output,
    Shutdown,
    Step,
    Submit,
    ToEngine,
)

MAX_FAILED_STEPS: Final = 3
"""Steps in a row that may raise before the engine gives up: something is wrong with more than one request."""

log = structlog.get_logger(__name__)


class EngineBroken(Exception):
    """The runner failed too many steps in a row; the process should end and be started anew."""


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`describe` gives the words for what a load raised: the error tree is not the engine's to know."""
        self._runner = runner
        self._scheduler = scheduler
        self._inbox = inbox
        self._loader = loader
        self._describe = describe
        self._clock = clock
        self._failures: list[Failure] = []
        self._compared: list[Compared] = []
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
            case Abort():
                self._scheduler.abort(message.request_ids)

    def _turn(self) -> bool:
        """Do all that can be done without waiting, one step at most; returns whether nothing is left to do."""
        self._take_loads()
        if self._inbox.congested:
            return True
        started = self._clock()
        schedule = self._scheduler.schedule(started)
        self._failures += schedule.failures
        for slot in schedule.evicted_slots:
            self._runner.release_adapter(slot)
        for placement in schedule.placements:
            self._loader.start(placement.slot, Path(placement.file.path), placement.chunk_ids)
        if schedule.plan is None:
            self._tell([])
            return True  # requests may wait for loads, whose end wakes the inbox
        outputs = self._step(schedule.plan)
        self._tell(outputs, step_s=self._clock() - started)
        return False

    def _take_loads(self) -> None:
        for loaded in self._loader.completed():
            if isinstance(loaded.outcome, AdapterLoad):
                self._scheduler.adapter_loaded(loaded.slot, loaded.outcome, loaded.seconds, self._clock())
            else:
                log.warning("engine.load_failed", slot=loaded.slot, error=str(loaded.outcome))
                self._failures += self._scheduler.adapter_failed(loaded.slot, self._describe(loaded.outcome))

    def _step(self, plan: StepPlan) -> list[Output]:
        started = self._clock()
        try:
            result = self._runner.execute(plan)
            now = self._clock()
            outputs = self._scheduler.update(plan, result, now - started, now)
        except Exception as error:
            log.exception("engine.step_failed", step=plan.step, requests=len(plan.sequences))
            self._failures += self._scheduler.fail_step(plan, STEP_FAILED)
            self._failed_steps += 1
            if self._failed_steps >= MAX_FAILED_STEPS:
                self._tell([], step_s=self._clock() - started)
                raise EngineBroken(f"{self._failed_steps} steps in a row failed") from error
            return []
        self._failed_steps = 0
        self._compared = self._scheduler.take_compared()
        if broken := result.broken_request_ids:
            self._failures += self._scheduler.fail(broken, NOT_FINITE)
            outputs = [output for output in outputs if output.request_id not in broken]
            self._compared = [compared for compared in self._compared if compared.request_id not in broken]
        return outputs

    def _tell(self, outputs: list[Output], *, step_s: float | None = None) -> None:
        """Send one frame after a step, or when something changed without one."""
        status, changes = self._scheduler.status(), self._scheduler.take_adapter_changes()
        if step_s is None and not (self._failures or changes or status != self._told):
            return
        failures, compared = tuple(self._failures), tuple(self._compared)
        told = (self._scheduler.step, tuple(outputs), failures, status, changes.adapters, changes.gone)
        self._inbox.send(Step(*told, step_s or 0.0, compared))
        self._failures.clear()
        self._compared.clear()
        self._told = status
