"""The engine's decisions: what runs in the next step, and what its outcome means. Pure: no I/O, time is an argument.

`schedule` makes a step's plan: first one token of every request that is generating, then chunks of prompts, oldest
admission first, under the prefill budget. `update` (or `fail_step`) takes the outcome. Between them the scheduler owns
every request: waiting in the queue, or running with its blocks and adapter reference, or gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from worker.engine import refusal
from worker.engine.admission import admit
from worker.engine.config import EngineConfig
from worker.engine.memory import Memory
from worker.engine.plan import AdapterLoad, NewRequest, SampledTokens, SequenceStep, StepPlan, StepResult
from worker.engine.rates import StepRates
from worker.engine.request import Request
from worker.engine.residency import Placement
from worker.engine.waiting import ArrivalQueue, WaitingQueue
from worker.mailbox import EngineStatus, Failure, Output, Position, Submit


@dataclass(frozen=True, slots=True)
class Schedule:
    """What to do next: forget evicted slots, then start loads, then execute the plan if there is one."""

    evicted_slots: tuple[int, ...]
    placements: tuple[Placement, ...]
    plan: StepPlan | None


class Scheduler:
    """Owns all requests of one engine."""

    def __init__(self, config: EngineConfig, rates: StepRates, waiting: WaitingQueue | None = None) -> None:
        self._config = config
        self._rates = rates
        self._waiting: WaitingQueue = ArrivalQueue() if waiting is None else waiting
        self._waiting_prompt_tokens = 0
        self._running: dict[int, Request] = {}
        self._memory = Memory(config)
        self._ended: list[int] = []  # known to the runner, which is told with the next plan that succeeds
        self._step = 0

    @property
    def step(self) -> int:
        """Number of the last plan made, 0 before the first."""
        return self._step

    def submit(self, submit: Submit) -> Failure | None:
        """Queue a request, or return why it can never run. Raises ValueError when its id is in use."""
        if submit.request_id in self._running or submit.request_id in self._waiting:
            raise ValueError(f"request id {submit.request_id} is already in use")
        problem = None if submit.adapter is None else refusal.adapter_too_large(submit.adapter, self._config)
        if problem is None:
            problem = refusal.check(submit, self._config)
        if problem is not None:
            return Failure(submit.request_id, *problem)
        known = refusal.max_known_tokens(submit, self._config)
        slot = None if submit.adapter is None else self._memory.residency.find(submit.adapter.artifact_digest)
        request = Request.from_submit(
            submit,
            max_known_tokens=known,
            num_blocks=self._config.blocks_for(known - 1),
            adapter_on_device=slot is not None and not slot.loading,
        )
        self._waiting.add(request)
        self._waiting_prompt_tokens += request.prompt_tokens
        return None

    def abort(self, request_ids: Iterable[int]) -> None:
        """End requests without an event and free what they hold; unknown ids are ignored."""
        for request_id in request_ids:
            if request_id in self._running:
                self._end(self._running[request_id])
            else:
                self._leave_queue(request_id)

    def adapter_loaded(self, slot_index: int, load: AdapterLoad, seconds: float, now: float) -> None:
        """Note that a load is done and took `seconds`; requests that wait for it can be admitted from now on."""
        slot = self._memory.loaded(slot_index, load, seconds)
        for request in self._waiting_for(slot.file.artifact_digest):
            request.adapter_on_device = False
            request.adapter_load_s += now - max(slot.load_started_s, request.arrival_s)
            request.adapter_ready_s = now - request.arrival_s

    def adapter_failed(self, slot_index: int, problem: refusal.Problem) -> list[Failure]:
        """Note that a load failed: the slot is free again and all requests that wait for the adapter fail."""
        slot = self._memory.failed(slot_index)
        failures = []
        for request in self._waiting_for(slot.file.artifact_digest):
            self._leave_queue(request.request_id)
            failures.append(Failure(request.request_id, *problem))
        return failures

    def schedule(self, now: float) -> Schedule:
        """Admit what fits and plan the next step. Every plan must be answered by `update` or `fail_step`."""
        placements: tuple[Placement, ...] = ()
        if self._waiting:
            admission = admit(
                self._waiting.in_order(),
                num_running=len(self._running),
                memory=self._memory,
                config=self._config,
                now=now,
            )
            placements = admission.placements
            for request in admission.admitted:
                self._leave_queue(request.request_id)
                self._running[request.request_id] = request
        plan = self._plan() if self._running else None
        return Schedule(self._memory.take_evicted(), placements, plan)

    def update(self, plan: StepPlan, result: StepResult, seconds: float, now: float) -> list[Output]:
        """Take a step's outcome: note computed and new tokens, end what is finished. Returns each request's gain.

        Raises ValueError, and changes nothing, when the result does not answer the plan.
        """
        sampled = _sampled_by_request(plan, result)
        self._ended.clear()
        outputs: list[Output] = []
        prefill_tokens = decode_tokens = 0
        for sequence in plan.sequences:
            request = self._running[sequence.request_id]
            if request.uncomputed_prompt_tokens:
                prefill_tokens += len(sequence.token_ids)
            else:
                decode_tokens += len(sequence.token_ids)
            request.computed_tokens = sequence.position + len(sequence.token_ids)
            if sequence.sample:
                outputs.append(self._take(request, sampled[sequence.request_id], now))
        self._rates.add_step(prefill_tokens, decode_tokens, seconds)
        return outputs

    def fail_step(self, plan: StepPlan, problem: refusal.Problem) -> list[Failure]:
        """Take a step that raised: all of its requests fail and free what they hold; the others run on."""
        return self.fail([sequence.request_id for sequence in plan.sequences], problem)

    def fail(self, request_ids: Sequence[int], problem: refusal.Problem) -> list[Failure]:
        """Fail requests, freeing what those that still run hold."""
        for request_id in request_ids:
            if request_id in self._running:
                self._end(self._running[request_id])
        return [Failure(request_id, *problem) for request_id in request_ids]

    def status(self) -> EngineStatus:
        """Return what the engine tells of itself."""
        queued = sum([request.uncomputed_prompt_tokens for request in self._running.values()])
        return EngineStatus(
            running_requests=len(self._running),
            waiting_requests=len(self._waiting),
            queued_prefill_tokens=self._waiting_prompt_tokens + queued,
            free_blocks=self._memory.available(),
            prefill_tokens_per_second=self._rates.prefill.tokens_per_second,
            decode_tokens_per_second=self._rates.decode.tokens_per_second,
            adapters=self._memory.residency.view(),
        )

    def _plan(self) -> StepPlan:
        self._step += 1
        new: list[NewRequest] = []
        sequences: list[SequenceStep] = []
        prefilling: list[Request] = []
        for request in self._running.values():
            if request.computed_tokens < request.prompt_tokens:
                prefilling.append(request)
            else:
                sequences.append(self._sequence(request, len(request.token_ids) - request.computed_tokens))
        budget = self._config.max_prefill_tokens
        for request in prefilling:
            if not budget:
                break
            count = min(budget, len(request.token_ids) - request.computed_tokens)
            budget -= count
            if not request.announced:
                request.announced = True
                new.append(NewRequest(request.request_id, tuple(request.token_ids), request.sampling))
            sequences.append(self._sequence(request, count))
        return StepPlan(self._step, tuple(new), tuple(sequences), tuple(self._ended))

    def _sequence(self, request: Request, count: int) -> SequenceStep:
        start = request.computed_tokens
        end = start + count
        num_blocks = self._config.blocks_for(end)
        if num_blocks != len(request.blocks_in_use):
            request.blocks_in_use = request.block_ids[:num_blocks]
        return SequenceStep(
            request.request_id,
            tuple(request.token_ids[start:end]),
            start,
            request.blocks_in_use,
            request.adapter_slot,
            end == len(request.token_ids),
        )

    def _take(self, request: Request, sampled: SampledTokens, now: float) -> Output:
        first = not request.generated_tokens
        if first:
            request.first_token_s = now
        finish = ""
        taken = 0
        for token_id in sampled.token_ids:
            request.token_ids.append(token_id)
            taken += 1
            finish = request.finish_reason(token_id, self._config.eos_token_ids)
            if finish:
                break
        if finish:
            self._end(request)
        return Output(
            request.request_id,
            sampled.token_ids[:taken],
            tuple([Position(entry.logprob, entry.top) for entry in sampled.logprobs[:taken]]),
            finish,
            request.timing(now) if finish or first else None,
        )

    def _waiting_for(self, artifact_digest: str) -> list[Request]:
        return [
            request
            for request in self._waiting.in_order()
            if request.adapter is not None and request.adapter.artifact_digest == artifact_digest
        ]

    def _leave_queue(self, request_id: int) -> None:
        request = self._waiting.remove(request_id)
        if request is not None:
            self._waiting_prompt_tokens -= request.prompt_tokens

    def _end(self, request: Request) -> None:
        del self._running[request.request_id]
        self._memory.drop_blocks(request.block_ids)
        if request.adapter is not None:
            self._memory.release(request.adapter_slot)
        if request.announced:
            self._ended.append(request.request_id)


def _sampled_by_request(plan: StepPlan, result: StepResult) -> dict[int, SampledTokens]:
    sampled = {entry.request_id: entry for entry in result.sampled}
    expected = {sequence.request_id for sequence in plan.sequences if sequence.sample}
    if result.step != plan.step or sampled.keys() != expected or len(sampled) != len(result.sampled):
        raise ValueError(f"the runner's result does not answer the plan of step {plan.step}")
    if not all(entry.token_ids for entry in result.sampled):
        raise ValueError(f"the runner sampled no token for a request of step {plan.step}")
    return sampled
