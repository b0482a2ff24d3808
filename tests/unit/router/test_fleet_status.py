"""How status messages add up."""

from __future__ import annotations

from loraplex.types.v1 import generation_pb2
from loraplex.worker.v1 import worker_pb2
from router.fleet_status import WorkerStatus
from router.placement import Residency, State, Tier


def message(**fields: object) -> worker_pb2.WatchStatusResponse:
    return worker_pb2.WatchStatusResponse(worker_id="w1", epoch="e1", **fields)  # type: ignore[arg-type]


def residency(digest: str, tier: int, **fields: object) -> worker_pb2.AdapterResidency:
    return worker_pb2.AdapterResidency(artifact_digest=digest, tier=tier, **fields)  # type: ignore[arg-type]


FULL = message(
    full=True,
    sequence=4,
    state=worker_pb2.WORKER_STATE_SERVING,
    base_digest="b",
    running_requests=2,
    queued_prefill_tokens=7,
    prefill_tokens_per_second=10.0,
    max_context_tokens=2048,
    adapters=[residency("x", generation_pb2.ADAPTER_TIER_DEVICE), residency("y", generation_pb2.ADAPTER_TIER_DISK)],
)


def test_unset_fields_stay_and_set_zeros_count() -> None:
    status = WorkerStatus().merged(FULL).merged(message(sequence=5, running_requests=0))
    assert (status.sequence, status.running_requests, status.queued_prefill_tokens) == (5, 0, 7)
    assert (status.state, status.base_digest, status.max_context_tokens) == (State.SERVING, "b", 2048)
    assert status.adapters == {"x": Residency(Tier.DEVICE), "y": Residency(Tier.DISK)}


def test_adapters_change_come_and_go_without_touching_the_older_status() -> None:
    before = WorkerStatus().merged(FULL)
    after = before.merged(
        message(
            sequence=5,
            adapters=[
                residency("y", generation_pb2.ADAPTER_TIER_DEVICE, loading=True, in_flight=3),
                residency("z", 99),
            ],
            removed_artifact_digests=["x", "unknown"],
        )
    )
    assert after.adapters == {"y": Residency(Tier.DEVICE, loading=True, in_flight=3), "z": Residency(Tier.SOURCE)}
    assert set(before.adapters) == {"x", "y"}


def test_a_full_message_forgets_everything() -> None:
    restarted = worker_pb2.WatchStatusResponse(full=True, worker_id="w1", epoch="e2", sequence=1)
    status = WorkerStatus().merged(FULL).merged(restarted)
    assert status == WorkerStatus(worker_id="w1", epoch="e2", sequence=1)


def test_a_state_of_a_newer_worker_does_not_serve() -> None:
    assert WorkerStatus().merged(message(state=17)).state is State.NOT_SERVING
