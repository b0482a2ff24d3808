"""What one worker last said of itself, as a value, and how a status message changes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

from loraplex.worker.v1 import worker_pb2
from router.placement import NO_ADAPTERS, Residency, State, Tier, TierUse

_STATES: Final[Mapping[int, State]] = {
    worker_pb2.WORKER_STATE_STARTING: State.STARTING,
    worker_pb2.WORKER_STATE_SERVING: State.SERVING,
    worker_pb2.WORKER_STATE_NOT_SERVING: State.NOT_SERVING,
    worker_pb2.WORKER_STATE_DRAINING: State.DRAINING,
}
_PLAIN_FIELDS: Final = (
    "base_digest",
    "running_requests",
    "waiting_requests",
    "queued_prefill_tokens",
    "prefill_tokens_per_second",
    "decode_tokens_per_second",
    "free_blocks",
    "total_blocks",
    "max_context_tokens",
    "device",
    "dtype",
    "base_quantization",
    "dedicated_artifact_digest",
)
_TIER_USES: Final = ("device_tier", "host_tier", "disk_tier")
_TIERS: Final = frozenset(int(tier) for tier in Tier)


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """The sum of a status stream's messages; fields as in loraplex.worker.v1.WatchStatusResponse."""

    worker_id: str = ""
    epoch: str = ""
    sequence: int = 0
    state: State = State.STARTING
    base_digest: str = ""
    running_requests: int = 0
    waiting_requests: int = 0
    queued_prefill_tokens: int = 0
    prefill_tokens_per_second: float = 0.0
    decode_tokens_per_second: float = 0.0
    free_blocks: int = 0
    total_blocks: int = 0
    max_context_tokens: int | None = None
    device: str = ""
    dtype: str = ""
    base_quantization: str = ""
    device_tier: TierUse | None = None
    host_tier: TierUse | None = None
    disk_tier: TierUse | None = None
    dedicated_artifact_digest: str = ""
    adapters: Mapping[str, Residency] = field(default_factory=lambda: NO_ADAPTERS)

    def merged(self, message: worker_pb2.WatchStatusResponse) -> WorkerStatus:
        """Return the status after `message`; a full one forgets all that was."""
        before = WorkerStatus() if message.full else self
        changes: dict[str, Any] = {
            "worker_id": message.worker_id or before.worker_id,
            "epoch": message.epoch or before.epoch,
            "sequence": message.sequence,
        }
        if message.HasField("state"):
            changes["state"] = _STATES.get(message.state, State.NOT_SERVING)
        changes |= {name: getattr(message, name) for name in _PLAIN_FIELDS if message.HasField(name)}
        changes |= {name: _tier_use(getattr(message, name)) for name in _TIER_USES if message.HasField(name)}
        if message.adapters or message.removed_artifact_digests:
            adapters = dict(before.adapters)
            for digest in message.removed_artifact_digests:
                adapters.pop(digest, None)
            for adapter in message.adapters:
                adapters[adapter.artifact_digest] = _residency(adapter)
            changes["adapters"] = MappingProxyType(adapters)
        return replace(before, **changes)


def _tier_use(message: worker_pb2.TierUse) -> TierUse:
    return TierUse(message.used_bytes, message.budget_bytes, message.num_adapters, message.max_adapters)


def _residency(message: worker_pb2.AdapterResidency) -> Residency:
    return Residency(
        tier=Tier(message.tier) if message.tier in _TIERS else Tier.SOURCE,
        loading=message.loading,
        in_flight=message.in_flight,
        pinned=message.pinned,
        artifact_bytes=message.artifact_bytes,
        quarantine_reason=message.quarantine_reason,
        quarantine_end_s=message.quarantine_end_time.ToNanoseconds() / 1e9,
    )
