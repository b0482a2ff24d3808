"""Drives a `Scheduler` with a `FakeRunner` by hand: no threads, no clock, loads end when a test says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable
from dataclasses import replace
from pathlib import Path

import msgspec

from tests.fake_runner import FakeRunner, Started
from worker.engine.config import EngineConfig
from worker.engine.plan import StepPlan
from worker.engine.rates import StepRates
from worker.engine.refusal import STEP_FAILED, Problem
from worker.engine.residency import Placement, Residency
from worker.engine.scheduler import Scheduler
from worker.mailbox import (
    AdapterFile,
    AdapterOnDevice,
    Compare,
    Compared,
    Failure,
    Load,
    Output,
    Pin,
    Provide,
    Sampling,
    Steered,
    Submit,
    Unload,
    Unpin,
    Urgency,
)

CONFIG = EngineConfig(
    vocab_size=256,
    eos_token_ids=frozenset({0}),
    max_context_tokens=64,
    block_tokens=4,
    total_blocks=32,
    max_running_requests=8,
    max_prefill_tokens=16,
    max_resident_adapters=2,
    max_adapter_wait_s=2.0,
)
LOAD_FAILURE = Problem("CORRUPT_ARTIFACT", "the adapter's file is damaged", {"tensor": "x"})


def on_device(residency: Residency) -> dict[str, AdapterOnDevice]:
    """What the slots hold or are loading, by artifact digest."""
    return {
        slot.file.artifact_digest: AdapterOnDevice(
            slot.file.artifact_digest, slot.loading, slot.in_flight, slot.device_bytes, slot.load_s
        )
        for slot in residency._by_index.values()
    }


class Driver:
    """One engine's decisions and their consequences, recorded per request."""

    def __init__(self, folder: Path, *, max_in_flight: int = 1, **limits: object) -> None:
        self.max_in_flight = max_in_flight
        self.in_flight: deque[tuple[StepPlan, Started]] = deque()
        self.num_ahead = 0  # plans made while another was in flight
        self.config = replace(CONFIG, **limits)  # type: ignore[arg-type]
        self.folder = folder
        self.runner = FakeRunner(
            vocab_size=self.config.vocab_size,
            max_context_tokens=self.config.max_context_tokens,
            block_tokens=self.config.block_tokens,
            total_blocks=self.config.total_blocks,
            chunk_bytes=self.config.chunk_bytes,
            adapter_chunk_bytes=self.config.adapter_chunk_bytes,
        )
        self.scheduler = Scheduler(self.config, StepRates(100.0, 10.0))
        self.now = 100.0
        self.next_id = 1
        self.loading: dict[int, Placement] = {}
        self.hurried: list[int] = []
        self.begun: set[int] = set()  # loads that cannot be dropped any more
        self.started_loads: list[str] = []
        self.prompts: dict[int, tuple[int, ...]] = {}
        self._told: dict[str, AdapterOnDevice] = {}
        self.adapters: dict[int, AdapterFile | None] = {}
        self.tokens: dict[int, list[int]] = {}
        self.first_step: dict[int, int] = {}
        self.finished: dict[int, Output] = {}
        self.failed: dict[int, Failure] = {}
        self.aborted: set[int] = set()
        self.comparisons: dict[int, Compare] = {}
        self.compared: dict[int, Compared] = {}
        self.orders: dict[int, Load | Unload | Pin] = {}
        self.steered: dict[int, Steered] = {}
        self.fail_next_step = False
        self.wanted: list[int] = []  # requests that wait for their adapter's file

    def file(self, name: str, size: int = 0, outside: int = 0, vocabulary: int = 0) -> AdapterFile:
        """An adapter that exists; its bytes are its name."""
        path = self.folder / name
        if not path.exists():
            path.write_bytes(name.encode())
        return AdapterFile(name, str(path), size or len(name), outside, vocabulary)

    def told(self) -> dict[str, AdapterOnDevice]:
        """The adapters as the front end knows them, who has heard of all changes."""
        changes = self.scheduler.take_adapter_changes()
        self._told |= {adapter.artifact_digest: adapter for adapter in changes.adapters}
        for digest in changes.gone:
            self._told.pop(digest, None)
        return self._told

    def submit(
        self,
        prompt: int | tuple[int, ...] = 3,
        max_tokens: int = 4,
        adapter: str | AdapterFile | None = None,
        tenant: str = "default",
        weight: float = 1.0,
        *,
        absent: bool = False,
        **sampling: object,
    ) -> int:
        """Submit a request; `absent` says that the front end has no file of its adapter any more."""
        request_id = self.next_id
        self.next_id += 1
        tokens = tuple((request_id + i) % 200 + 1 for i in range(prompt)) if isinstance(prompt, int) else prompt
        file = self.file(adapter) if isinstance(adapter, str) else adapter
        self.prompts[request_id] = tokens
        self.adapters[request_id] = file
        self.tokens[request_id] = []
        failure = self.scheduler.submit(
            Submit(
                request_id,
                tokens,
                Sampling(max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
                file if file is None else msgspec.structs.replace(file, on_disk=not absent),
                tenant,
                self.now,
                weight,
            )
        )
        if failure is not None:
            self._fail(failure)
        return request_id

    def compare(
        self,
        tokens: tuple[int, ...],
        exact: AdapterFile,
        measured: AdapterFile,
        first: int = 0,
    ) -> int:
        request_id = self.next_id
        self.next_id += 1
        compare = Compare(request_id, tokens, first, exact, measured, "evaluation")
        self.comparisons[request_id] = compare
        failure = self.scheduler.compare(compare)
        if failure is not None:
            self._fail(failure)
        return request_id

    def load(self, adapter: str | AdapterFile, urgency: Urgency = Urgency.ASKED) -> int:
        file = self.file(adapter) if isinstance(adapter, str) else adapter
        return self._order(Load(self.next_id, file, urgency))

    def provide(self, *request_ids: int) -> None:
        """Bring the file of requests' adapters: of all that wait for it, where none is named."""
        for request_id in request_ids or tuple(self.wanted):
            self.wanted.remove(request_id)
            file = self.adapters[request_id]
            assert file is not None
            self.scheduler.provide(Provide(request_id, file))

    def unload(self, name: str) -> int:
        return self._order(Unload(self.next_id, name))

    def pin(self, name: str, size: int = 0, outside: int = 0, vocabulary: int = 0) -> int:
        return self._order(Pin(self.next_id, name, size or len(name), outside, vocabulary))

    def unpin(self, name: str) -> None:
        self.scheduler.order(Unpin(name))
        self.drop_unwanted()

    def _order(self, order: Load | Unload | Pin) -> int:
        self.next_id += 1
        self.orders[order.request_id] = order
        self.scheduler.order(order)
        self.drop_unwanted()
        self.hear()
        return order.request_id

    def hear(self) -> None:
        """Note the orders that have been done or have failed."""
        steered, failures = self.scheduler.take_orders_done()
        for each in steered:
            assert self.is_live(each.request_id)
            self.steered[each.request_id] = each
        for failure in failures:
            self._fail(failure)

    def drop_unwanted(self) -> None:
        """What the loop does about loads that nobody wants any more, if none of them has begun."""
        for slot in self.scheduler.unwanted_loads():
            if slot not in self.begun:
                del self.loading[slot]
                self.scheduler.load_given_up(slot)
        self.hear()

    def abort(self, *request_ids: int) -> None:
        self.aborted.update(request_id for request_id in request_ids if self.is_live(request_id))
        self.scheduler.abort(request_ids)
        self.drop_unwanted()

    def step(self, seconds: float = 0.01) -> StepPlan | None:
        """One turn of the loop: schedule, start loads and the step, update by the step whose turn it is."""
        self.place_ahead()
        schedule = self.scheduler.schedule(self.now)
        for failure in schedule.failures:
            self._fail(failure)
        self._begin_loads(schedule.evicted_slots, schedule.placements)
        self.hurried += schedule.hurried_slots
        for request_id in schedule.wanted:
            assert self.is_live(request_id)
            assert request_id not in self.wanted, "a file is asked for twice"
            self.wanted.append(request_id)
        self.hear()
        self.now += seconds
        plan = schedule.plan
        if plan is not None:
            self._start(plan)
            if len(self.in_flight) < self.max_in_flight:
                return plan
        if self.in_flight:
            self.answer(seconds)
        return plan

    def place_ahead(self) -> None:
        """Begin the loads of requests that have come, before a step is planned."""
        self._begin_loads(*self.scheduler.place_ahead(self.now))

    def _begin_loads(self, evicted_slots: Iterable[int], placements: Iterable[Placement]) -> None:
        for slot in evicted_slots:
            self.runner.release_adapter(slot)
        for placement in placements:
            self.loading[placement.slot] = placement
            self.begun.discard(placement.slot)
            self.started_loads.append(placement.file.artifact_digest)

    def _start(self, plan: StepPlan) -> None:
        self.num_ahead += bool(self.in_flight)
        for sequence in plan.sequences:
            self.first_step.setdefault(sequence.request_id, plan.step)
        if self.fail_next_step:
            self.fail_next_step = False
            self.runner.fail_steps.add(plan.step)
        self.in_flight.append((plan, self.runner.start(plan)))

    def answer(self, seconds: float = 0.01) -> None:
        """Take the outcome of the oldest step in flight."""
        plan, started = self.in_flight.popleft()
        try:
            outputs = self.scheduler.update(plan, started.result(), seconds, self.now)
        except RuntimeError:
            for failure in self.scheduler.fail_step(plan, STEP_FAILED):
                self._fail(failure)
            while self.in_flight:  # as the loop does: nothing may go on from what has failed
                self.answer(seconds)
            return
        for output in outputs:
            assert self.is_live(output.request_id)
            self.tokens[output.request_id] += output.token_ids
            if output.finish:
                self.finished[output.request_id] = output
        for compared in self.scheduler.take_compared():
            assert self.is_live(compared.request_id)
            self.compared[compared.request_id] = compared

    def finish_loads(self) -> None:
        for slot in list(self.loading):
            self.finish_load(slot)

    def finish_load(self, slot: int, *, seconds: float = 0.1) -> None:
        placement = self.loading.pop(slot)
        load = self.runner.prepare_adapter(slot, Path(placement.file.path), placement.chunk_ids)
        self.scheduler.adapter_loaded(slot, load, seconds, self.now)
        self.hear()

    def fail_load(self, slot: int) -> None:
        del self.loading[slot]
        for failure in self.scheduler.adapter_failed(slot, LOAD_FAILURE)[1]:
            self._fail(failure)
        self.hear()

    def is_live(self, request_id: int) -> bool:
        ended: list[Container[int]] = [self.finished, self.failed, self.aborted, self.compared, self.steered]
        return not any(request_id in ends for ends in ended)

    @property
    def live(self) -> list[int]:
        return [request_id for request_id in self.prompts if self.is_live(request_id)]

    @property
    def comparing(self) -> list[int]:
        return [request_id for request_id in self.comparisons if self.is_live(request_id)]

    @property
    def ordering(self) -> list[int]:
        return [request_id for request_id in self.orders if self.is_live(request_id)]

    def run_until_idle(self, *, max_steps: int = 1000) -> int:
        """Step, ending loads as they come, until no request is left; returns the number of turns it took."""
        for turn in range(max_steps):
            if not (self.live or self.comparing or self.ordering or self.in_flight):
                return turn
            self.step()
            self.provide()
            self.finish_loads()
        left = (self.live, self.comparing, self.ordering)
        raise AssertionError(f"requests, comparisons, orders {left} still live after {max_steps} turns")

    def _fail(self, failure: Failure) -> None:
        assert self.is_live(failure.request_id)
        self.failed[failure.request_id] = failure
