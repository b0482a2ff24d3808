"""A runner without a model: deterministic tokens, and a strict check of every plan it is given.

The next token is a pure function of the adapter's bytes and all tokens before, so chunking, batching and neighbours
must not change it. Some prompt tokens are orders (see `Trigger`), so that tests across processes can ask for failures.
An adapter is any file; one that starts with `corrupt` raises CorruptArtifact, with `crash` RuntimeError; one that
starts with `slow` waits for `load_gate` (if there is one) or 0.2 s.

The arena's contents are kept: every KV position holds a hash of the adapter and all tokens up to it, every chunk of an
adapter that adapter's slot. A step that reads what is not what its own request or adapter wrote, or something equal,
fails: so blocks may be shared, and no chunk may have two owners.
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from loraplex.errors import CorruptArtifact
from worker.engine.plan import (
    BASE_SLOT,
    PENDING,
    AdapterLoad,
    ComparedPositions,
    ComparisonStep,
    HostChanges,
    NewRequest,
    SampledLogprobs,
    SampledTokens,
    SequenceStep,
    StepPlan,
    StepResult,
)


class Trigger(IntEnum):
    """What the first prompt token makes the fake do, when `triggers` is on."""

    FAIL_STEP = 1  # every step with this request raises
    CRASH_PROCESS = 2  # the process ends with status 42 at once
    HANG = 3  # the step lasts 3600 s
    EOS_SOON = 4  # the fourth generated token is the end of sequence
    NOT_FINITE = 99  # every sampled token comes from logits that are NaN


@dataclass(frozen=True)
class Started:
    """A step whose outcome is told when it is asked for, after a while."""

    outcome: StepResult | Exception
    seconds: float = 0.0

    def result(self) -> StepResult:
        if self.seconds:
            time.sleep(self.seconds)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@dataclass
class _Sequence:
    new: NewRequest
    tokens: list[int]  # prompt and what was sampled
    hashes: list[int] = field(default_factory=list)  # of the adapter and tokens[: i + 1]
    computed: int = -1  # nothing was computed yet
    blocks: tuple[int, ...] = ()
    slot: int | None = None
    adapter: bytes = b""  # by identity: another load of equal bytes is another adapter
    sampled_in: int = -1  # number of steps started when it was last sampled


def next_token(tokens: Sequence[int], adapter: bytes, vocab_size: int, eos: int) -> int:
    """The fake model: never eos."""
    digest = zlib.crc32(adapter + b"|" + ",".join(map(str, tokens)).encode())
    token = digest % vocab_size
    return token if token != eos else (token + 1) % vocab_size


def expected_tokens(
    prompt: Sequence[int], count: int, *, adapter: bytes = b"", vocab_size: int = 256, eos: int = 0
) -> list[int]:
    """What a request must generate, alone or in any company."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, adapter, vocab_size, eos))
    return tokens[len(prompt) :]


def expected_comparison(
    tokens: Sequence[int], first: int, exact: bytes, measured: bytes, vocab_size: int = 256, eos: int = 0
) -> ComparedPositions:
    """What comparing two adapters must give: 0 where they are the same, else a number of the tokens and both."""
    same: list[bool] = []
    kl: list[float] = []
    for end in range(first + 1, len(tokens) + 1):
        said = [next_token(tokens[:end], adapter, vocab_size, eos) for adapter in (exact, measured)]
        same.append(said[0] == said[1])
        distance = zlib.crc32(measured, zlib.crc32(exact)) % 1000 + 1 + end
        kl.append(0.0 if exact == measured else distance / 1000)
    return ComparedPositions(tuple(same), tuple(kl))


@dataclass
class FakeRunner:
    """See the module. All plan invariants are asserted; a broken one raises AssertionError out of `execute`."""

    vocab_size: int = 256
    max_context_tokens: int = 256
    block_tokens: int = 16
    total_blocks: int = 64
    chunk_bytes: int = 4096
    adapter_chunk_bytes: int = 4096
    eos_token: int = 0
    step_s: float = 0.0
    triggers: bool = False
    fail_steps: set[int] = field(default_factory=set)  # step numbers that raise
    load_gate: threading.Event | None = None
    prefill_rate: float = 1000.0
    decode_rate: float = 100.0
    device: str = "cpu"
    dtype: str = "float32"
    host_budget_bytes: int = 0

    def __post_init__(self) -> None:
        self.eos_token_ids = frozenset({self.eos_token})
        self.loads_begun = threading.Semaphore(0)
        self.host: dict[str, bytes] = {}
        self._host_came: list[str] = []
        self._host_gone: list[str] = []
        self.sequences: dict[int, _Sequence] = {}
        self.adapters: dict[int, bytes] = {}
        self.contents: list[dict[int, int]] = [{} for _ in range(self.total_blocks)]  # offset -> hash, -1 -> slot
        self.adapter_chunks: dict[int, tuple[int, ...]] = {}
        self.plans: list[StepPlan] = []
        self.keep_plans = False
        self._lock = threading.Lock()
        self._started = 0
        self._lost: set[int] = set()  # requests of the last step, if that failed
        self._doubtful: set[int] = set()  # requests of a plan that failed: their end may be told twice

    def calibrate(self) -> tuple[float, float]:
        return self.prefill_rate, self.decode_rate

    def start(self, plan: StepPlan) -> Started:
        """Compute at once, as the device does in the end, and tell later; a broken invariant is raised here."""
        self._started += 1
        lost, self._lost = self._lost, {step.request_id for step in plan.sequences}
        self._doubtful |= self._lost | set(plan.ended_request_ids)
        if lost & self._lost:
            return Started(RuntimeError("the step that this one goes on from has failed"), self.step_s)
        try:
            result = self.execute(plan)
        except RuntimeError as error:
            return Started(error, self.step_s)
        self._lost = set()
        return Started(result, self.step_s)

    def execute(self, plan: StepPlan) -> StepResult:
        if self.keep_plans:
            self.plans.append(plan)
        self._begin(plan)
        self._obey(plan)
        sampled = tuple([s for step in plan.sequences if (s := self._compute(step)) is not None])
        broken = [s.request_id for s in sampled if self._is_broken(s.request_id)]
        compared = None
        if plan.comparison is not None:
            compared = self._compare(plan.comparison, {b for step in plan.sequences for b in step.block_ids})
            if self.triggers and plan.comparison.token_ids[0] == Trigger.NOT_FINITE:
                broken.append(plan.comparison.request_id)
        return StepResult(plan.step, sampled, tuple(broken), compared)

    def prepare_adapter(self, slot: int, path: Path, chunk_ids: tuple[int, ...]) -> AdapterLoad:
        data = self._read(path)
        self.loads_begun.release()
        if data.startswith(b"slow"):
            if self.load_gate is None:
                time.sleep(0.2)
            else:
                assert self.load_gate.wait(30), "nobody opened the load gate"
        if data.startswith((b"corrupt", b"crash")):
            self.forget_on_host(path.name)
        if data.startswith(b"corrupt"):
            raise CorruptArtifact("the adapter's file is damaged", path=path.name)
        if data.startswith(b"crash"):
            raise RuntimeError("a bug in the adapter's loading")
        with self._lock:
            assert slot not in self.adapters, f"slot {slot} is loaded over a resident adapter"
            self.adapters[slot] = data
            used = -(-len(data) // self.adapter_chunk_bytes) if self.adapter_chunk_bytes else 0
            assert used <= len(chunk_ids), "too few chunks were granted"
            self.adapter_chunks[slot] = chunk_ids[:used]
            for chunk in chunk_ids[:used]:
                self.contents[chunk] = {-1: slot}
        return AdapterLoad(len(data), used)

    def forget_on_host(self, artifact_digest: str) -> None:
        with self._lock:
            if self.host.pop(artifact_digest, None) is not None:
                self._host_gone.append(artifact_digest)

    def take_host_changes(self) -> HostChanges:
        with self._lock:
            came, gone = list(self._host_came), list(self._host_gone)
            self._host_came.clear()
            self._host_gone.clear()
            return HostChanges(sum(map(len, self.host.values())), tuple(came), tuple(gone))

    def _read(self, path: Path) -> bytes:
        """Read a file, or its copy on the host; what came first leaves first."""
        with self._lock:
            if path.name in self.host:
                return self.host[path.name]
        data = path.read_bytes()
        with self._lock:
            while self.host and sum(map(len, self.host.values())) + len(data) > self.host_budget_bytes:
                self._host_gone.append(next(iter(self.host)))
                del self.host[self._host_gone[-1]]
            if len(data) <= self.host_budget_bytes:
                self.host[path.name] = data
                self._host_came.append(path.name)
        return data

    def release_adapter(self, slot: int) -> None:
        with self._lock:
            del self.adapter_chunks[slot]
            del self.adapters[slot]  # a request that still uses it fails its check in the next plan

    def _begin(self, plan: StepPlan) -> None:
        for request_id in plan.ended_request_ids:
            sequence = self.sequences.pop(request_id, None)
            assert sequence is not None or request_id in self._doubtful, f"unknown request {request_id} ended"
        for new in plan.new_requests:
            assert new.request_id not in self.sequences, f"request {new.request_id} is announced twice"
            self.sequences[new.request_id] = _Sequence(new, [*new.prompt_token_ids, *new.generated_token_ids])
        ids = [step.request_id for step in plan.sequences]
        assert ids or plan.comparison is not None, "an empty plan"
        assert len(set(ids)) == len(ids), "a request stands twice in a plan"
        assert set(ids) >= {new.request_id for new in plan.new_requests}, "a new request computes nothing"
        for step in plan.sequences:
            self._check(step)
        self._doubtful |= set(ids) | set(plan.ended_request_ids)

    def _check(self, step: SequenceStep) -> None:
        sequence = self.sequences[step.request_id]
        end = step.position + len(step.token_ids)
        assert step.token_ids, "a request computes no token"
        if step.position != sequence.computed and step.position % self.block_tokens == 0:
            assert step.position > sequence.computed, "what is computed is computed again"
            sequence.computed = step.position  # what lies before was computed for another request, see below
        assert step.position == sequence.computed, "positions are not contiguous: KV is read before it is written"
        known = sequence.tokens[step.position : end]
        if step.token_ids[-1] == PENDING:
            assert sequence.sampled_in == self._started - 1, "a token is pending that the last step has not chosen"
            known[-1] = PENDING
        assert list(step.token_ids) == known, "tokens differ from the known ones"
        assert step.sample == (end == len(sequence.tokens)), "sampling before, or not at, the last known token"
        assert len(step.block_ids) == -(-end // self.block_tokens), "wrong number of KV blocks"
        assert step.block_ids[: len(sequence.blocks)] == sequence.blocks, "the KV blocks of a request changed"
        assert sequence.slot in (None, step.adapter_slot), "the adapter slot of a request changed"
        if step.adapter_slot != BASE_SLOT:
            assert step.adapter_slot in self.adapters, "the adapter is not resident"
            if sequence.slot is None:
                sequence.adapter = self.adapters[step.adapter_slot]
            assert sequence.adapter is self.adapters[step.adapter_slot], "the adapter changed under a request"
            for chunk in self.adapter_chunks[step.adapter_slot]:
                assert self.contents[chunk] == {-1: step.adapter_slot}, f"chunk {chunk} of the adapter was overwritten"
        assert len(set(step.block_ids)) == len(step.block_ids), "a block stands for two ranges of positions"
        last = sequence.hashes[-1] if sequence.hashes else zlib.crc32(sequence.adapter)
        for token in sequence.tokens[len(sequence.hashes) : end]:
            last = hash((last, token))
            sequence.hashes.append(last)
        for index, block in enumerate(step.block_ids):
            assert 0 <= block < self.total_blocks
            at = min((index + 1) * self.block_tokens, step.position) - 1  # the last computed position of this block
            if at >= index * self.block_tokens:
                found = self.contents[block].get(at % self.block_tokens)
                assert found == sequence.hashes[at], f"KV block {block} holds something else at position {at}"
        sequence.blocks = step.block_ids
        sequence.slot = step.adapter_slot

    def _obey(self, plan: StepPlan) -> None:
        if plan.step in self.fail_steps:
            raise RuntimeError(f"step {plan.step} was told to fail")
        if not self.triggers:
            return
        orders = [self.sequences[step.request_id].new.prompt_token_ids[0] for step in plan.sequences]
        if plan.comparison is not None:
            orders.append(plan.comparison.token_ids[0])
        for order in orders:
            if order == Trigger.CRASH_PROCESS:
                os._exit(42)
            if order == Trigger.HANG:
                time.sleep(3600)
            if order == Trigger.FAIL_STEP:
                raise RuntimeError("a request told the step to fail")

    def _is_broken(self, request_id: int) -> bool:
        return self.triggers and self.sequences[request_id].new.prompt_token_ids[0] == Trigger.NOT_FINITE

    def _compare(self, step: ComparisonStep, others: set[int]) -> ComparedPositions:
        """Check that a comparison has blocks of its own and resident adapters, and write what its KV would be."""
        tokens = step.token_ids
        each = -(-len(tokens) // self.block_tokens)
        blocks = [*step.exact_block_ids, *step.measured_block_ids]
        assert len(step.exact_block_ids) == len(step.measured_block_ids) == each, "wrong number of KV blocks"
        assert len(set(blocks)) == len(blocks), "a block stands for two ranges of positions"
        assert not others & set(blocks), "a request of the same step uses a block of the comparison"
        assert 0 <= step.first_position < len(tokens) <= self.max_context_tokens
        for slot in (step.exact_slot, step.measured_slot):
            assert slot in self.adapters, "the adapter is not resident"
            for chunk in self.adapter_chunks[slot]:
                assert self.contents[chunk] == {-1: slot}, f"chunk {chunk} of the adapter was overwritten"
        for block in blocks:
            self.contents[block] = dict.fromkeys(range(self.block_tokens), step.request_id)
        exact, measured = self.adapters[step.exact_slot], self.adapters[step.measured_slot]
        return expected_comparison(tokens, step.first_position, exact, measured, self.vocab_size, self.eos_token)

    def _compute(self, step: SequenceStep) -> SampledTokens | None:
        sequence = self.sequences[step.request_id]
        for position in range(step.position, step.position + len(step.token_ids)):
            content = self.contents[step.block_ids[position // self.block_tokens]]
            if -1 in content:
                content.clear()  # an adapter that used this chunk before and has left, or else finds it gone
            content[position % self.block_tokens] = sequence.hashes[position]
        sequence.computed += len(step.token_ids)
        self._doubtful.discard(step.request_id)
        if not step.sample:
            return None
        prompt = sequence.new.prompt_token_ids
        token = next_token(sequence.tokens, sequence.adapter, self.vocab_size, self.eos_token)
        if self.triggers and prompt[0] == Trigger.EOS_SOON and len(sequence.tokens) == len(prompt) + 3:
            token = self.eos_token
        sequence.tokens.append(token)
        sequence.sampled_in = self._started
        alternatives = sequence.new.sampling.logprobs
        logprobs: tuple[SampledLogprobs, ...] = ()
        if alternatives >= 0:
            top = tuple([((token + rank) % self.vocab_size, -0.5 - rank) for rank in range(alternatives)])
            logprobs = (SampledLogprobs(-0.5, top),)
        return SampledTokens(step.request_id, (token,), logprobs)
