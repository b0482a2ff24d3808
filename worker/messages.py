"""From the worker's values to protobuf messages. Pure; decides nothing."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

from loraplex.types.v1.evaluation_pb2 import Evaluation, EvaluationProgress
from loraplex.types.v1.generation_pb2 import (
    AdapterTier,
    ChoiceFinished,
    Delta,
    Finished,
    FinishReason,
    PositionLogprobs,
    ServingFacts,
    TokenLogprob,
    Usage,
)
from loraplex.worker.v1.worker_pb2 import (
    AdapterResidency,
    EvaluateAdapterResponse,
    GenerateResponse,
    TierUse,
    WatchStatusResponse,
    WorkerState,
)
from worker.evaluation.outcome import Outcome, Progress
from worker.generation import FINISHED_BY_STOP, ChoiceEnd, TextDelta
from worker.mailbox import Position, Timing
from worker.status import AdapterStatus, State, Tier, WorkerStatus
from worker.text.vocabulary import Vocabulary

_STATES: Final = {
    State.STARTING: WorkerState.WORKER_STATE_STARTING,
    State.SERVING: WorkerState.WORKER_STATE_SERVING,
    State.NOT_SERVING: WorkerState.WORKER_STATE_NOT_SERVING,
    State.DRAINING: WorkerState.WORKER_STATE_DRAINING,
}
TIERS: Final = {
    Tier.DEVICE: AdapterTier.ADAPTER_TIER_DEVICE,
    Tier.HOST: AdapterTier.ADAPTER_TIER_HOST,
    Tier.DISK: AdapterTier.ADAPTER_TIER_DISK,
    Tier.SOURCE: AdapterTier.ADAPTER_TIER_SOURCE,
}
_TIER_FIELDS: Final = {"device_tier": Tier.DEVICE, "host_tier": Tier.HOST, "disk_tier": Tier.DISK}
_SCALARS: Final = (
    "running_requests",
    "waiting_requests",
    "queued_prefill_tokens",
    "prefill_tokens_per_second",
    "decode_tokens_per_second",
    "free_blocks",
    "total_blocks",
    "block_tokens",
    "max_context_tokens",
    "base_digest",
    "device",
    "dtype",
    "base_quantization",
)


def delta_message(delta: TextDelta, vocabulary: Vocabulary) -> GenerateResponse:
    """Return the message of new text."""

    def token(token_id: int, logprob: float) -> TokenLogprob:
        return TokenLogprob(token_id=token_id, token=vocabulary.token_bytes(token_id), logprob=logprob)

    def position(token_id: int, chances: Position) -> PositionLogprobs:
        return PositionLogprobs(chosen=token(token_id, chances.logprob), top=[token(*entry) for entry in chances.top])

    return GenerateResponse(
        delta=Delta(
            index=delta.index,
            text=delta.text,
            token_ids=delta.token_ids,
            logprobs=[position(*entry) for entry in zip(delta.token_ids, delta.logprobs, strict=False)],
        )
    )


def choice_end_message(end: ChoiceEnd) -> GenerateResponse:
    """Return the message of a choice's end."""
    stopped = end.reason == FINISHED_BY_STOP
    reason = FinishReason.FINISH_REASON_STOP if stopped else FinishReason.FINISH_REASON_LENGTH
    return GenerateResponse(choice_finished=ChoiceFinished(index=end.index, reason=reason, stop_string=end.stop))


def tier_of(timing: Timing, *, fetched: bool) -> Tier:
    """Return where a request found its adapter."""
    if fetched:
        return Tier.SOURCE
    return Tier.DEVICE if timing.adapter_on_device else Tier.HOST if timing.adapter_on_host else Tier.DISK


def serving_facts(
    timing: Timing,
    *,
    fetch_s: float,
    fetched: bool,
    base_digest: str,
    base_quantization: str,
    digests: tuple[str, str] | None,
    worker_id: str,
) -> ServingFacts:
    """Return the facts of one RPC.

    `digests` are the adapter's version and artifact, None for the base. `fetch_s` was spent in the front end before
    the engine heard of the request: the engine counts it as queueing, here it is loading.
    """
    facts = ServingFacts(base_digest=base_digest, base_quantization=base_quantization, worker_id=worker_id)
    if digests is not None:
        facts.version_digest, facts.artifact_digest = digests
        facts.tier_hit = TIERS[tier_of(timing, fetched=fetched)]
    for duration, seconds in (
        (facts.queue_time, max(0.0, timing.queue_s - fetch_s)),
        (facts.adapter_load_time, timing.adapter_load_s + fetch_s),
        (facts.prefill_time, timing.prefill_s),
        (facts.decode_time, timing.decode_s),
    ):
        duration.FromNanoseconds(int(seconds * 1e9))
    return facts


def finished_message(
    prompt_tokens: int, completion_tokens: int, facts: ServingFacts, *, cached_tokens: int = 0
) -> GenerateResponse:
    """Return the last message of a successful stream."""
    usage = Usage(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, cached_tokens=cached_tokens)
    return GenerateResponse(finished=Finished(usage=usage, facts=facts))


def evaluation_message(event: Progress | Outcome) -> EvaluateAdapterResponse:
    """Return the message of an evaluation's progress or outcome, whose fields are the values'."""
    if isinstance(event, Progress):
        return EvaluateAdapterResponse(progress=EvaluationProgress(**asdict(event)))
    return EvaluateAdapterResponse(evaluation=Evaluation(**asdict(event)))


def status_message(previous: WorkerStatus | None, status: WorkerStatus) -> WatchStatusResponse:
    """Return what a stream that was last told `previous` has to be told now.

    Everything for a new stream, and after a change of epoch: what was known of residency is void.
    """
    full = previous is None or previous.epoch != status.epoch
    message = WatchStatusResponse(full=full, worker_id=status.worker_id, epoch=status.epoch, sequence=status.sequence)
    if full or previous is None or previous.state is not status.state:
        message.state = _STATES[status.state]
    for name in _SCALARS:
        value = getattr(status, name)
        if full or getattr(previous, name) != value:
            setattr(message, name, value)
    for name, tier in _TIER_FIELDS.items():
        use = status.tiers.get(tier)
        if use is not None and (full or previous is None or previous.tiers.get(tier) != use):
            getattr(message, name).CopyFrom(TierUse(**asdict(use)))
    known = {} if full or previous is None else previous.adapters
    if status.adapters is not known:
        # Unchanged adapters are the same objects, of which there may be thousands.
        message.adapters.extend(
            _residency(adapter)
            for digest, adapter in status.adapters.items()
            if (before := known.get(digest)) is not adapter and before != adapter
        )
        message.removed_artifact_digests.extend(known.keys() - status.adapters.keys())
    return message


def _residency(adapter: AdapterStatus) -> AdapterResidency:
    residency = AdapterResidency(
        artifact_digest=adapter.artifact_digest,
        tier=TIERS[adapter.tier],
        loading=adapter.loading,
        pinned=adapter.pinned,
        in_flight=adapter.in_flight,
        artifact_bytes=adapter.artifact_bytes,
    )
    if adapter.quarantine_reason:
        residency.quarantine_reason = adapter.quarantine_reason
        residency.quarantine_end_time.FromNanoseconds(int(adapter.quarantine_end_s * 1e9))
    return residency
