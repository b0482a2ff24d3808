"""A request inside the engine: one class holds all of its state, from the inbox to its last token.

A request is `WAITING` (it holds nothing), then `RUNNING` (it holds all KV blocks it can ever need and a reference on
its adapter), then it ends: finished, failed or aborted, and holds nothing again. "Known" tokens are the prompt and
what was generated so far; a step computes known tokens until none is left, which is when the next one is sampled.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from worker.engine.plan import BASE_SLOT
from worker.mailbox import AdapterFile, Sampling, Submit, Timing


@dataclass(slots=True, eq=False)
class Request:
    """All state of one request. Each field says who sets it; nobody else does."""

    # Set once by `Scheduler.submit`.
    request_id: int
    prompt_tokens: int
    """Length of the prompt."""
    sampling: Sampling
    adapter: AdapterFile | None
    tenant: str
    arrival_s: float
    """When the RPC came, by the front end's clock, which is the engine's."""
    max_known_tokens: int
    """Prompt plus the longest answer that parameters and context allow."""
    num_blocks: int
    """KV blocks that hold all tokens that can ever be computed (the last one sampled never is)."""

    # Set by `Scheduler.submit`, then appended to by `Scheduler.update`.
    token_ids: list[int]
    """Known tokens: the prompt, then what was generated."""

    # Set by `Scheduler.submit` and corrected by `Scheduler.adapter_loaded`.
    adapter_on_device: bool
    """The adapter was on the device when the request came and never had to be loaded for it."""

    # Set by `Scheduler.adapter_loaded`.
    adapter_load_s: float = 0.0
    """Seconds this request waited while its adapter was being loaded."""
    adapter_ready_s: float = 0.0
    """Seconds from its arrival until that load was done."""

    # Set by `admission`.
    passed_over_s: float | None = None
    """When a request that came later was first admitted before this one."""
    admitted_s: float = 0.0
    """When it became RUNNING."""
    adapter_slot: int = BASE_SLOT
    block_ids: tuple[int, ...] = ()
    """Its KV blocks, all of them, in order of position."""

    # Set by `Scheduler.schedule`.
    announced: bool = False
    """The runner knows it: a plan carried it as a new request."""
    blocks_in_use: tuple[int, ...] = field(default=())
    """The prefix of `block_ids` that the last plan named; kept so that it is cut anew only when it grows."""

    # Set by `Scheduler.update`.
    computed_tokens: int = 0
    """Known tokens whose KV is written."""
    first_token_s: float = 0.0
    """When the first generated token came out."""

    @classmethod
    def from_submit(cls, submit: Submit, *, max_known_tokens: int, num_blocks: int, adapter_on_device: bool) -> Request:
        """Return the request in state WAITING."""
        return cls(
            request_id=submit.request_id,
            prompt_tokens=len(submit.prompt_token_ids),
            sampling=submit.sampling,
            adapter=submit.adapter,
            tenant=submit.tenant,
            arrival_s=submit.arrival_s,
            max_known_tokens=max_known_tokens,
            num_blocks=num_blocks,
            token_ids=list(submit.prompt_token_ids),
            adapter_on_device=adapter_on_device,
        )

    @property
    def generated_tokens(self) -> int:
        """Number of tokens generated so far."""
        return len(self.token_ids) - self.prompt_tokens

    @property
    def uncomputed_prompt_tokens(self) -> int:
        """Prompt tokens whose KV is not yet written."""
        return max(0, self.prompt_tokens - self.computed_tokens)

    def finish_reason(self, token_id: int, eos_token_ids: frozenset[int]) -> str:
        """Return why `token_id`, just appended, ends the request: "stop", "length", or "" when it does not.

        An end-of-sequence token counts once `min_tokens` tokens stand before it.
        """
        generated = self.generated_tokens
        if token_id in eos_token_ids and not self.sampling.ignore_eos and generated > self.sampling.min_tokens:
            return "stop"
        return "length" if len(self.token_ids) >= self.max_known_tokens else ""

    def timing(self, now: float) -> Timing:
        """Return where the request's time went, if its last token came out at `now`."""
        return Timing(
            queue_s=max(0.0, self.admitted_s - self.arrival_s - self.adapter_load_s),
            adapter_load_s=self.adapter_load_s,
            prefill_s=self.first_token_s - self.admitted_s,
            decode_s=now - self.first_token_s,
            adapter_on_device=self.adapter_on_device,
            adapter_ready_s=self.adapter_ready_s,
        )
