"""A request inside the engine: one class holds all of its state, from the inbox to its last token.

A request is `WAITING` (it holds nothing), then `RUNNING` (it holds the KV blocks of what it has computed and a
reference on its adapter), perhaps `WAITING` again (preempted: it keeps its tokens only), then it ends: finished,
failed or aborted. "Known" tokens are the prompt and what was generated so far; a step computes known tokens until none
is left, which is when the next one is sampled. There are no phases: a prompt, a preempted answer and a cached prefix
differ only in how many known tokens are left to compute. A plan counts as computed once it is made, and the token that
it will sample counts as known, PENDING until it is answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from worker.engine.plan import BASE_SLOT, PENDING, NewRequest, SequenceStep
from worker.engine.prefix import next_key
from worker.mailbox import AdapterFile, Sampling, Submit, Timing


@dataclass(slots=True, eq=False)
class Request:
    """All state of one request. Each field says who sets it; nobody else does."""

    # Set once by `Scheduler.submit`.
    request_id: int
    sequence: int
    """Order of arrival."""
    prompt_tokens: int
    """Length of the prompt."""
    sampling: Sampling
    adapter: AdapterFile | None
    """Set again by `WaitingQueue.provide`, to the same with its file on the disk."""
    tenant: str
    arrival_s: float
    """When the RPC came, by the front end's clock, which is the engine's."""
    max_known_tokens: int
    """Prompt plus the longest answer that parameters and context allow."""
    chain_start: bytes
    """Where the chain of its blocks' keys begins."""

    # Set by `Scheduler.submit`, then appended to by `next_step` and `take`.
    token_ids: list[int]
    """Known tokens: the prompt, then what was generated; PENDING where steps in flight have yet to choose."""

    # Set by `Scheduler.submit` and corrected by `Scheduler.adapter_loaded` and `WaitingQueue.park`.
    adapter_on_device: bool
    """The adapter was on the device when the request came and never had to be loaded for it."""

    # Set once by `Scheduler.submit`.
    adapter_on_host: bool = False
    """The adapter was in the host tier when the request came."""

    # Set by `Scheduler.adapter_loaded`.
    adapter_load_s: float = 0.0
    """Seconds this request waited while its adapter was being loaded."""
    adapter_ready_s: float = 0.0
    """Seconds from its arrival until that load was done."""

    # Set by `Scheduler.schedule`.
    was_admitted: bool = False
    """It runs, or was preempted."""
    cached_tokens: int = 0
    """Prompt tokens whose KV others had computed."""

    # Set by `admission`.
    passed_over_s: float | None = None
    """When a request behind it was first admitted before it; None again once it is admitted, or parked."""
    admitted_s: float = 0.0
    """When it first became RUNNING."""
    # Set by `admission` and `growth`, cleared when it ends or is preempted.
    adapter_slot: int = BASE_SLOT
    block_ids: tuple[int, ...] = ()
    """Its KV blocks in order of position."""

    # Set by `Scheduler.schedule`, cleared when it is preempted.
    announced: bool = False
    """The runner knows it: a plan carried it as a new request."""

    # Set by `admission` (a cached prefix) and `next_step`, cleared when it is preempted.
    computed_tokens: int = 0
    """Known tokens whose KV is written, once the plans in flight are answered."""
    # Set by `admission` and `Memory`, cleared when it is preempted.
    published_blocks: int = 0
    """Leading blocks that were offered to later requests, or came from earlier ones."""

    # Set by `Scheduler.update`.
    first_token_s: float = 0.0
    """When the first generated token came out."""

    _keys: list[bytes] = field(default_factory=list)

    @classmethod
    def from_submit(
        cls,
        submit: Submit,
        *,
        sequence: int,
        max_known_tokens: int,
        chain_start: bytes,
        adapter_on_device: bool,
        adapter_on_host: bool = False,
    ) -> Request:
        """Return the request in state WAITING."""
        return cls(
            request_id=submit.request_id,
            sequence=sequence,
            prompt_tokens=len(submit.prompt_token_ids),
            sampling=submit.sampling,
            adapter=submit.adapter,
            tenant=submit.tenant,
            arrival_s=submit.arrival_s,
            max_known_tokens=max_known_tokens,
            chain_start=chain_start,
            token_ids=list(submit.prompt_token_ids),
            adapter_on_device=adapter_on_device,
            adapter_on_host=adapter_on_host,
        )

    @property
    def generated_tokens(self) -> int:
        """Number of tokens generated so far, pending ones too."""
        return len(self.token_ids) - self.prompt_tokens

    @property
    def left_tokens(self) -> int:
        """Known tokens that no plan has computed; at least 1 while it runs."""
        return len(self.token_ids) - self.computed_tokens

    @property
    def uncomputed_tokens(self) -> int:
        """Tokens to compute before it generates (again): 0 for one that does."""
        left = self.left_tokens
        return 0 if left == 1 and self.generated_tokens else left

    def key(self, block: int, block_tokens: int) -> bytes:
        """Return the prefix key of one of its blocks, all of whose tokens are known."""
        keys = self._keys
        while len(keys) <= block:
            start = len(keys) * block_tokens
            previous = keys[-1] if keys else self.chain_start
            keys.append(next_key(previous, self.token_ids[start : start + block_tokens]))
        return keys[block]

    def as_new(self) -> NewRequest:
        """Return what the runner has to know of it."""
        prompt, answer = self.token_ids[: self.prompt_tokens], self.token_ids[self.prompt_tokens :]
        return NewRequest(self.request_id, tuple(prompt), self.sampling, tuple(answer))

    def next_step(self, count: int) -> SequenceStep:
        """Plan its next `count` known tokens, for which it has blocks, and note what that computes and samples."""
        tokens, start = self.token_ids, self.computed_tokens
        self.computed_tokens = end = start + count
        sample = end == len(tokens)
        step = SequenceStep(self.request_id, tuple(tokens[start:end]), start, self.block_ids, self.adapter_slot, sample)
        if sample:
            tokens.append(PENDING)
        return step

    def take(self, token_ids: Sequence[int], position: int, eos_token_ids: frozenset[int]) -> tuple[int, str]:
        """Take what was sampled for `position`, as far as the request goes on; returns how many tokens, and its end.

        The end is "stop", "length", or "" for a request that goes on. An end-of-sequence token counts once
        `min_tokens` tokens stand before it.
        """
        for taken, token_id in enumerate(token_ids, 1):
            known = position + taken
            self.token_ids[known - 1 : known] = (token_id,)
            ends = token_id in eos_token_ids and not self.sampling.ignore_eos
            if ends and known - self.prompt_tokens > self.sampling.min_tokens:
                return taken, "stop"
            if known >= self.max_known_tokens:
                return taken, "length"
        return len(token_ids), ""

    def forget_computed(self) -> None:
        """Become WAITING again, with all known tokens to be computed."""
        self.adapter_slot = BASE_SLOT
        self.block_ids = ()
        self.announced = False
        self.computed_tokens = self.published_blocks = 0

    def timing(self, now: float) -> Timing:
        """Return where the request's time went, if its last token came out at `now`."""
        return Timing(
            queue_s=max(0.0, self.admitted_s - self.arrival_s - self.adapter_load_s),
            adapter_load_s=self.adapter_load_s,
            prefill_s=self.first_token_s - self.admitted_s,
            decode_s=now - self.first_token_s,
            adapter_on_device=self.adapter_on_device,
            adapter_ready_s=self.adapter_ready_s,
            cached_tokens=self.cached_tokens,
            adapter_on_host=self.adapter_on_host,
        )
