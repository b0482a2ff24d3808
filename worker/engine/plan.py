"""The values that cross the engine's borders: what one step computes and what came out.

`StepPlan` and `StepResult` are flat and serializable. The scheduler makes a plan, a `Runner` executes it, nothing else
passes between them. What a step has one of per request is a msgspec.Struct, which is made ten times faster than a
frozen dataclass. Token positions count from 0; `block_ids` are KV blocks of `block_tokens` tokens each.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from worker.mailbox import Sampling

BASE_SLOT = -1
"""Adapter slot of a request that asks for the base model."""
PENDING = -1
"""Stands for the token that the step before chooses for the same request, in a plan made before that is known."""


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request the runner has to know: what its sampler needs until it ends.

    One that was preempted is told as ended and comes again, with what it had generated: the sampler must go on as if
    nothing had happened.
    """

    request_id: int
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    generated_token_ids: tuple[int, ...] = ()
    """Tokens of the answer that are known already, in order."""


class SequenceStep(msgspec.Struct, frozen=True, gc=False):
    """What one request computes in one step: known tokens `[position, position + len(token_ids))`."""

    request_id: int
    token_ids: tuple[int, ...]
    """The last one may be PENDING."""
    position: int
    """Of the first token. All before it is computed, though perhaps for another request: then it is ahead of what this
    one's last step ended with, by whole blocks."""
    block_ids: tuple[int, ...]
    """KV blocks of positions 0 .. position + len(token_ids) - 1, in order: chunk ids of the arena.

    Blocks wholly below `position` may be shared with other requests and are only read. A block that is new here holds
    whatever was in its chunk, perhaps a part of an adapter: what lies past the written positions is not even finite."""
    adapter_slot: int
    """Device slot of the adapter, or BASE_SLOT."""
    sample: bool
    """Whether the last position's logits choose the next token (false for all but a prompt's last chunk)."""


class ComparisonStep(msgspec.Struct, frozen=True, gc=False):
    """Tokens that are computed under two artifacts of an adapter, from position 0 on, to compare their logits."""

    request_id: int
    token_ids: tuple[int, ...]
    first_position: int
    """Logits of the tokens from here to the last are compared."""
    exact_slot: int
    exact_block_ids: tuple[int, ...]
    """KV blocks of this step alone; see SequenceStep."""
    measured_slot: int
    """The same as `exact_slot` where an artifact is compared with itself."""
    measured_block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of the whole batch."""

    step: int
    new_requests: tuple[NewRequest, ...]
    sequences: tuple[SequenceStep, ...]
    ended_request_ids: tuple[int, ...]
    """Requests whose sampler state may be forgotten before this step. Told again when a step failed, so unknown ids are
    to be ignored."""
    comparison: ComparisonStep | None = None


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """Log probabilities of one generated position: the chosen token's and the likeliest alternatives'."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, log probability), likeliest first."""


class SampledTokens(msgspec.Struct, frozen=True, gc=False):
    """Tokens a request gained in a step, with one logprobs entry each where the request asked for them."""

    request_id: int
    token_ids: tuple[int, ...]
    logprobs: tuple[SampledLogprobs, ...] = ()


class ComparedPositions(msgspec.Struct, frozen=True, gc=False):
    """What a comparison found; see mailbox.Compared."""

    same_top: tuple[bool, ...]
    kl: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came out of a plan: one entry per sequence with `sample`, and its comparison's."""

    step: int
    sampled: tuple[SampledTokens, ...]
    broken_request_ids: tuple[int, ...] = ()
    """Of those sampled or compared, requests whose logits were NaN or infinite: what came out means nothing."""
    compared: ComparedPositions | None = None


def sampled_by_request(plan: StepPlan, result: StepResult) -> dict[int, SampledTokens]:
    """Return what a step sampled, by request id. Raises ValueError when the result does not answer the plan."""
    sampled = {entry.request_id: entry for entry in result.sampled}
    expected = {sequence.request_id for sequence in plan.sequences if sequence.sample}
    if result.step != plan.step or sampled.keys() != expected or len(sampled) != len(result.sampled):
        raise ValueError(f"the runner's result does not answer the plan of step {plan.step}")
    if (plan.comparison is None) != (result.compared is None):
        raise ValueError(f"the runner's result does not answer the comparison of step {plan.step}")
    if not all(entry.token_ids for entry in result.sampled):
        raise ValueError(f"the runner sampled no token for a request of step {plan.step}")
    return sampled


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """How an adapter came to lie on the device."""

    device_bytes: int
    chunks_used: int
    """It occupies the first so many of the chunks it was granted; the others are free again."""


@dataclass(frozen=True, slots=True)
class HostChanges:
    """What the host tier holds, and the digests of adapters that came into it and left it since somebody asked."""

    used_bytes: int = 0
    came: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()


class StartedStep(Protocol):
    """A step that the device computes, or has computed."""

    def result(self) -> StepResult:
        """Wait for the step and return what came out; raises what made it fail."""
        ...


class Runner(Protocol):
    """Computes steps on the device. Called from the engine's main thread only, except `prepare_adapter`."""

    def start(self, plan: StepPlan) -> StartedStep:
        """Run the model over the plan's tokens, write their KV, sample where asked.

        May return before that is done; steps are computed in the order in which they were started. PENDING tokens are
        those of the step started last.
        """
        ...

    def prepare_adapter(self, slot: int, path: Path, chunk_ids: tuple[int, ...]) -> AdapterLoad:
        """Bring the packed adapter at `path` into device slot `slot` and the arena's chunks `chunk_ids`.

        Runs on a loader thread beside steps that use neither the slot nor the chunks. Raises CorruptArtifact,
        BaseMismatch or ResourceExhausted (the chunks do not hold it); then the slot is empty, no chunk in use, and no
        copy in the host tier.
        """
        ...

    def release_adapter(self, slot: int) -> None:
        """Forget the slot's adapter, whose chunks are about to be reused; no enqueued step uses it."""
        ...

    def forget_on_host(self, artifact_digest: str) -> None:
        """Drop an adapter's copy in the host tier, if there is one."""
        ...

    def take_host_changes(self) -> HostChanges:
        """Return what has changed in the host tier since the last call; nothing where there is none."""
        ...
