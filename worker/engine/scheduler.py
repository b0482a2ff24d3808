"""The engine's decisions: what runs in the next step, and what its outcome means. Pure: no I/O, time is an argument.

`schedule` makes a step's plan: running requests grow by the tokens that the budget gives them, then waiting ones are
admitted into what is left. `update` (or `fail_step`) takes the outcome. Between them the scheduler owns every request:
waiting in the queue, or running with its blocks and adapter reference, or gone. One more plan may be made while one is
in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from worker.engine import refusal
from worker.engine.admission import Admission, admit, place_ahead
from worker.engine.arena import Use
from worker.engine.comparisons import Comparisons
from worker.engine.comparisons import check as check_comparison
from worker.engine.config import EngineConfig
from worker.engine.fairness import TenantCounters
from worker.engine.growth import Shares, grow, share_prompt_tokens, share_tokens
from worker.engine.in_flight import MAX_IN_FLIGHT, PlansInFlight
from worker.engine.memory import Memory
from worker.engine.orders import NOBODY, Orders
from worker.engine.plan import (
    AdapterLoad,
    ComparisonStep,
    HostChanges,
    SampledTokens,
    StepPlan,
    StepResult,
    sampled_by_request,
)
from worker.engine.prefix import chain_start
from worker.engine.rates import StepRates
from worker.engine.request import Request
from worker.engine.residency import Changes, Placement
from worker.engine.waiting import WaitingQueue
from worker.mailbox import (
    Compare,
    Compared,
    EngineStatus,
    FailedLoad,
    Failure,
    Load,
    Output,
    Pin,
    Position,
    Provide,
    Steered,
    Submit,
    Unload,
    Unpin,
)


@dataclass(frozen=True, slots=True)
class Schedule:
    """What to do next: forget evicted slots, then start loads, then execute the plan if there is one."""

    evicted_slots: tuple[int, ...]
    placements: tuple[Placement, ...]
    plan: StepPlan | None
    failures: tuple[Failure, ...] = ()
    """What can never start."""
    hurried_slots: tuple[int, ...] = ()
    """Slots whose loads were begun for nobody in a hurry, and that requests wait for now."""
    wanted: tuple[int, ...] = ()
    """Requests whose adapter's file is to be asked for."""


class Scheduler:
    """Owns all requests of one engine."""

    def __init__(self, config: EngineConfig, rates: StepRates) -> None:
        self._config = config
        self._rates = rates
        self._memory = Memory(config, rates)
        self._counters = TenantCounters()
        self._waiting = WaitingQueue(self._counters)
        self._comparisons = Comparisons(self._memory, config)
        self._orders = Orders(self._memory, config)
        self._may_be_unwanted = False  # a load, since somebody left
        self._hurried: list[int] = []
        self._has_cold_arrivals = False
        self._host_bytes = 0
        self._compared: list[Compared] = []
        self._running: dict[int, Request] = {}
        self._plans = PlansInFlight()
        self._sequence = self._num_preempted = self._num_cached_tokens = 0

    # Requests come and go.

    def submit(self, submit: Submit) -> Failure | None:
        """Queue a request, or return why it can never run. Raises ValueError when its id is in use."""
        self._check_unused(submit.request_id)
        digest = None if submit.adapter is None else submit.adapter.artifact_digest
        pinned = refusal.pinned_room(self._memory.residency.pinned, self._config, digest)
        problem = None if submit.adapter is None else refusal.adapter_too_large(submit.adapter, self._config, pinned)
        if problem is None:
            problem = refusal.check(submit, self._config, pinned)
        if problem is not None:
            return Failure(submit.request_id, *problem)
        slot = None if digest is None else self._memory.residency.find(digest)
        self._sequence += 1
        request = Request.from_submit(
            submit,
            sequence=self._sequence,
            max_known_tokens=refusal.max_known_tokens(submit, self._config, pinned),
            chain_start=chain_start(self._config.base_identity, digest, submit.tenant),
            adapter_on_device=slot is not None and not slot.loading,
            adapter_on_host=digest in self._memory.on_host,
        )
        self._counters.set_weight(submit.tenant, submit.weight)
        self._waiting.add(request)
        self._counters.forget_absent(self._present_tenants)
        if digest is not None:
            self._orders.wanted(digest)
        if slot is not None and slot.loading:
            self._hurried.append(slot.index)
        self._has_cold_arrivals |= digest is not None and slot is None
        return None

    def provide(self, provide: Provide) -> None:
        """Take the file that a request waits for."""
        self._waiting.provide(provide.request_id, provide.adapter)

    def compare(self, compare: Compare) -> Failure | None:
        """Queue a comparison, or return why it can never run. Raises ValueError when its id is in use."""
        self._check_unused(compare.request_id)
        problem = check_comparison(compare, self._config)
        if problem is not None:
            return Failure(compare.request_id, *problem)
        self._comparisons.add(compare)
        for file in (compare.exact, compare.measured):
            self._orders.wanted(file.artifact_digest)
        return None

    def abort(self, request_ids: Iterable[int]) -> None:
        """End requests without an event and free what they hold; unknown ids are ignored."""
        for request_id in request_ids:
            if request_id in self._running:
                self._end(self._running[request_id])
            else:
                self._waiting.remove(request_id)
                self._comparisons.remove(request_id)
                self._orders.remove(request_id)
        self._may_be_unwanted = True

    def fail(self, request_ids: Sequence[int], problem: refusal.Problem) -> list[Failure]:
        """Fail requests, freeing what those that still run hold."""
        for request_id in request_ids:
            if request_id in self._running:
                self._end(self._running[request_id])
        return [Failure(request_id, *problem) for request_id in request_ids]

    # Adapters are steered.

    def order(self, order: Load | Unload | Pin | Unpin) -> None:
        """Take an order; `take_orders_done` tells when it is done. Raises ValueError when its id is in use."""
        if isinstance(order, Unpin):
            self._orders.unpin(order.artifact_digest)
            self._may_be_unwanted = True
            return
        self._check_unused(order.request_id)
        match order:
            case Load():
                self._orders.load(order)
            case Unload():
                self._orders.unload(order, used=self._is_used(order.artifact_digest))
                self._may_be_unwanted = True
            case Pin():
                self._orders.pin(order, [*self._waiting.in_order(), *self._waiting.parked, *self._running.values()])

    def take_orders_done(self) -> tuple[list[Steered], list[Failure]]:
        """Return the orders that were done and those that failed since the last call."""
        return self._orders.take_done()

    def unwanted_loads(self) -> list[int]:
        """Return the slots of loads that nobody wants any more; those that have not started need not."""
        if not self._may_be_unwanted:
            return []
        self._may_be_unwanted = False
        unwanted = []
        for slot in self._memory.residency.loading():
            digest = slot.file.artifact_digest
            if not (slot.pinned or self._is_used(digest) or self._orders.wants(digest)):
                unwanted.append(slot.index)
        return unwanted

    def load_given_up(self, slot_index: int) -> None:
        """Note that a load of `unwanted_loads` will not start."""
        self._memory.failed(slot_index)

    # Adapters come.

    def adapter_loaded(self, slot_index: int, load: AdapterLoad, seconds: float, now: float) -> None:
        """Note that a load is done and took `seconds`; requests that wait for it can be admitted from now on."""
        slot = self._memory.loaded(slot_index, load, seconds)
        if slot.tenant != NOBODY:
            self._counters.charge(slot.tenant, input_tokens=seconds * self._rates.prefill.tokens_per_second)
        self._orders.loaded(slot.file.artifact_digest)
        for request in self._waiting.waiting_for(slot.file.artifact_digest):
            if not request.was_admitted:
                request.adapter_on_device = False
                request.adapter_load_s += now - max(slot.load_started_s, request.arrival_s)
                request.adapter_ready_s = now - request.arrival_s

    def host_changed(self, changes: HostChanges) -> None:
        """Note which adapters came into the host tier and left it."""
        self._memory.on_host.update(changes.came)
        self._memory.on_host.difference_update(changes.gone)
        self._host_bytes = changes.used_bytes

    def adapter_failed(self, slot_index: int, problem: refusal.Problem) -> tuple[FailedLoad | None, list[Failure]]:
        """Note that a load failed: the slot is free again and all requests that wait for the adapter fail.

        Returns what is to be told of the adapter, and the requests' failures. Where its file was not there and its copy
        in host memory has left meanwhile, nobody fails: who waits asks for the file.
        """
        slot = self._memory.failed(slot_index)
        if not slot.file.on_disk:
            return None, []
        self._orders.failed(slot.file.artifact_digest, problem)
        failures = []
        for request in self._waiting.waiting_for(slot.file.artifact_digest):
            self._waiting.remove(request.request_id)
            failures.append(Failure(request.request_id, *problem))
        for request_id in self._comparisons.waiting_for(slot.file.artifact_digest):
            self._comparisons.remove(request_id)
            failures.append(Failure(request_id, *problem))
        return FailedLoad(slot.file.artifact_digest, *problem), failures

    # Steps.

    def schedule(self, now: float) -> Schedule:
        """Plan the next step. Plans are answered by `update` or `fail_step` in their order.

        While one is in flight there may be nothing to plan that does not depend on its outcome, though there is once it
        is answered. Raises ValueError while MAX_IN_FLIGHT are.
        """
        in_flight = self._plans.oldest
        if in_flight is not None and len(self._plans) >= MAX_IN_FLIGHT:
            raise ValueError(f"the plan of step {in_flight.step} has not been answered")
        compares = self._comparisons and not self._waiting
        if in_flight is not None and (compares or in_flight.comparison is not None):
            return Schedule((), (), None)
        shares, budget = share_tokens(self._running.values(), self._config, self._skip_cached)
        shares, short = self._grow(shares)
        placements: tuple[Placement, ...] = ()
        comparison: ComparisonStep | None = None
        failures: tuple[Failure, ...] = ()
        if (self._waiting or self._orders) and not short:
            admission = admit(self._waiting, tuple(self._running.values()), self._memory, self._config, now)
            placements = (*admission.placements, *self._place_ordered(admission, now))
            self._waiting.park(admission.lacking)
            for request in admission.admitted:
                self._admit(request)
            if not admission.admitted and not placements:
                failures = self._give_up_stuck()
            if admission.admitted:
                more: Shares = []
                budget = share_prompt_tokens(admission.admitted, budget, more, self._skip_cached)
                more, short = self._grow(more)
                shares += more
                if short:
                    shares = [share for share in shares if share[0].request_id in self._running]
        if self._comparisons and not (self._waiting or short or self._plans):  # its step is alone in flight
            loads, comparison = self._comparisons.next(self._running.values(), budget, now, alone=not shares)
            placements = (*placements, *loads)
            if not (placements or comparison or self._running) and (failure := self._comparisons.give_up()) is not None:
                failures = (*failures, failure)
        plan = self._plans.make(shares, comparison) if shares or comparison is not None else None
        hurried, self._hurried = tuple(self._hurried), []
        return Schedule(self._memory.take_evicted(), placements, plan, failures, hurried, self._waiting.take_wanted())

    def place_ahead(self, now: float) -> tuple[tuple[int, ...], tuple[Placement, ...]]:
        """Begin loads for requests that came since the last call, before a step is planned; returns as a Schedule does.

        A load that ends before that step is planned saves its requests the step.
        """
        if not (self._has_cold_arrivals and self._running) or self._plans:
            return (), ()
        self._has_cold_arrivals = False
        running = tuple(self._running.values())
        placements = place_ahead(self._waiting, running, self._memory, self._config, now)
        return self._memory.take_evicted(), placements

    def update(self, plan: StepPlan, result: StepResult, seconds: float, now: float) -> list[Output]:
        """Take a step's outcome: note computed and new tokens, end what is finished. Returns each request's gain.

        Raises ValueError, and changes nothing, when the result does not answer the plan.
        """
        sampled = sampled_by_request(plan, result)
        if len(self._plans) > 1 and any(len(entry.token_ids) > 1 for entry in result.sampled):
            raise ValueError(f"step {plan.step} sampled more tokens than the plan after it has counted on")
        self._answered(plan)
        if (compared := self._comparisons.finish(result.compared)) is not None:
            self._compared.append(compared)
        outputs: list[Output] = []
        prefill_tokens = decode_tokens = 0
        block_tokens = self._config.block_tokens
        for sequence in plan.sequences:
            request = self._running.get(sequence.request_id)
            count = len(sequence.token_ids)
            if sequence.sample and count == 1:
                decode_tokens += 1
            else:
                prefill_tokens += count
            if request is None:
                continue  # ended while the step ran
            computed = sequence.position + count
            is_full = computed >= (request.published_blocks + 1) * block_tokens
            if is_full and request.request_id not in result.broken_request_ids:
                self._memory.publish(request, computed)
            if sequence.sample:
                outputs.append(self._take(request, computed, sampled[sequence.request_id], now))
        if plan.comparison is None:  # it costs more than the tokens say
            self._rates.add_step(prefill_tokens, decode_tokens, seconds)
        return outputs

    def take_compared(self) -> list[Compared]:
        """Return the comparisons that `update` has finished since the last call."""
        compared, self._compared = self._compared, []
        return compared

    def fail_step(self, plan: StepPlan, problem: refusal.Problem) -> list[Failure]:
        """Take a step that raised: all of its requests fail and free what they hold; the others run on."""
        self._answered(plan)
        self._plans.tell_again(plan, self._is_announced)
        failed = [s.request_id for s in plan.sequences if s.request_id in self._running]
        if (comparing := self._comparisons.in_step()) is not None:
            failed.append(comparing)
        self._comparisons.finish(None)
        return self.fail(failed, problem)

    def take_adapter_changes(self) -> Changes:
        """Return which adapters came, left or changed since the last call."""
        return self._memory.take_adapter_changes()

    def status(self) -> EngineStatus:
        """Return what the engine tells of itself, but for its adapters."""
        arena = self._memory.arena
        queued = sum([request.uncomputed_tokens for request in self._running.values()])
        return EngineStatus(
            running_requests=len(self._running),
            waiting_requests=len(self._waiting) + len(self._waiting.parked) + len(self._comparisons),
            queued_prefill_tokens=self._waiting.uncomputed_tokens + queued,
            free_blocks=self._memory.available(),
            prefill_tokens_per_second=self._rates.prefill.tokens_per_second,
            decode_tokens_per_second=self._rates.decode.tokens_per_second,
            kv_blocks=arena.count(Use.KV),
            adapter_chunks=arena.count(Use.ADAPTER),
            prefix_blocks=arena.count(Use.IDLE_PREFIX),
            num_preempted=self._num_preempted,
            num_cached_tokens=self._num_cached_tokens,
            pinned_chunks=self._memory.residency.pinned_chunks,
            adapter_bytes=self._memory.residency.used_bytes,
            host_bytes=self._host_bytes,
        )

    def _place_ordered(self, admission: Admission, now: float) -> list[Placement]:
        if not (self._orders and admission.may_place):
            return []
        is_quiet = not (self._waiting or self._running or self._plans or self._memory.residency.is_loading)
        return self._orders.place(admission.claimed, reserve=admission.reserve, now=now, is_quiet=is_quiet)

    def _give_up_stuck(self) -> tuple[Failure, ...]:
        """Refuse the first waiting request where nothing is in use and it does not fit: pins are too large.

        They are refused before that, but what adapters take on the device is known once they are there only.
        """
        if self._running or self._plans or self._memory.residency.is_loading:
            return ()
        first = next(self._waiting.in_order(), None)
        if first is None:
            return ()
        self._waiting.remove(first.request_id)
        return (Failure(first.request_id, *refusal.cannot_start()),)

    def _is_used(self, artifact_digest: str) -> bool:
        """Tell whether a request or a comparison needs an adapter."""
        if self._waiting.waiting_for(artifact_digest) or self._comparisons.waiting_for(artifact_digest):
            return True
        adapters = [request.adapter for request in self._running.values()]
        return any(adapter is not None and adapter.artifact_digest == artifact_digest for adapter in adapters)

    def _grow(self, shares: Shares) -> tuple[Shares, bool]:
        preempt = None if self._plans else self._preempt
        growth = grow(shares, self._running.values(), self._memory, self._config, self._priority, preempt)
        return growth.shares, growth.short

    def _priority(self, request: Request) -> tuple[float, int]:
        return (self._counters.counter(request.tenant), request.sequence)

    def _admit(self, request: Request) -> None:
        self._waiting.remove(request.request_id)
        self._running[request.request_id] = request
        if not request.was_admitted:
            request.was_admitted = True
            self._counters.charge(request.tenant, input_tokens=request.prompt_tokens)
            self._count_cached(request, request.computed_tokens)

    def _skip_cached(self, request: Request) -> None:
        """Take what others have computed of a request's next tokens: they began with it before and are ahead."""
        self._count_cached(request, self._memory.skip_prefix(request))

    def _count_cached(self, request: Request, tokens: int) -> None:
        if tokens and not request.generated_tokens:
            request.cached_tokens += tokens
            self._num_cached_tokens += tokens
            self._counters.charge(request.tenant, input_tokens=-tokens)

    def _preempt(self, request: Request) -> None:
        """Make a running request wait again, with all it knows and nothing computed."""
        self._end(request)
        request.forget_computed()
        self._waiting.add(request)
        self._num_preempted += 1

    def _check_unused(self, request_id: int) -> None:
        is_requests = request_id in self._running or request_id in self._waiting
        if is_requests or request_id in self._comparisons or request_id in self._orders:
            raise ValueError(f"request id {request_id} is already in use")

    def _take(self, request: Request, position: int, sampled: SampledTokens, now: float) -> Output:
        first = position == request.prompt_tokens
        if first:
            request.first_token_s = now
        taken, finish = request.take(sampled.token_ids, position, self._config.eos_token_ids)
        self._counters.charge(request.tenant, output_tokens=taken)
        if finish:
            self._end(request)
        return Output(
            request.request_id,
            sampled.token_ids[:taken],
            tuple([Position(entry.logprob, entry.top) for entry in sampled.logprobs[:taken]])
            if sampled.logprobs
            else (),
            finish,
            request.timing(now) if finish or first else None,
        )

    def _end(self, request: Request) -> None:
        del self._running[request.request_id]
        if not self._plans.end(request):
            self._release(request)

    def _release(self, request: Request) -> None:
        self._memory.drop_blocks(request.block_ids)
        if request.adapter is not None:
            self._memory.release(request.adapter_slot)

    def _answered(self, plan: StepPlan) -> None:
        for request in self._plans.answered(plan):
            self._release(request)

    def _is_announced(self, request_id: int) -> bool:
        request = self._running.get(request_id)
        return request is not None and request.announced

    def _present_tenants(self) -> set[str]:
        return {*self._waiting.tenants(), *[request.tenant for request in self._running.values()]}
