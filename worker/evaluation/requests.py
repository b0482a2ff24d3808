"""Evaluation requests as they come over the wire, checked."""

from __future__ import annotations

from dataclasses import dataclass

from loraplex.digests import is_digest
from loraplex.errors import BaseMismatch, InvalidRequest
from loraplex.worker.v1.worker_pb2 import EvaluateAdapterRequest


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """What to measure; digests in lower-case hex."""

    version_digest: str
    artifact_digest: str
    exact_artifact_digest: str


def check_evaluation(request: EvaluateAdapterRequest, *, base_digest: str) -> EvaluationRequest:
    """Check a request. Raises InvalidRequest, naming the field, or BaseMismatch."""
    for field in ("base_digest", "version_digest", "artifact_digest", "exact_artifact_digest"):
        if not is_digest(getattr(request, field)):
            raise InvalidRequest(
                f"{field} is no digest; give 64 lower-case hex digits (SHA-256), as the registry tells them",
                field=field,
            )
    if request.base_digest != base_digest:
        raise BaseMismatch(
            f"the adapter belongs to base model {request.base_digest[:12]}, this worker serves {base_digest[:12]}; ask "
            "a worker of that base",
            field="base_digest",
            expected=base_digest,
            got=request.base_digest,
        )
    return EvaluationRequest(request.version_digest, request.artifact_digest, request.exact_artifact_digest)
