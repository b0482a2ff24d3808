"""How a request was served, as headers and as the `loraplex` object of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loraplex.types.v1 import generation_pb2
from router.catalog import Resolved


def fingerprint(resolved: Resolved) -> str:
    """Return `system_fingerprint`: what answers; it changes with the artifact or the base."""
    digest = resolved.version.artifact_digest if resolved.version else resolved.base_digest
    return f"fp_{digest[:12]}"


def fact_headers(resolved: Resolved, worker_ids: Sequence[str], request_id: str) -> list[tuple[bytes, bytes]]:
    """Return the headers of an answer: digests, workers, request id."""
    facts = {"x-request-id": request_id, "x-loraplex-base-digest": resolved.base_digest}
    if resolved.version is not None:
        facts["x-loraplex-version-digest"] = resolved.version.version_digest
        facts["x-loraplex-artifact-digest"] = resolved.version.artifact_digest
    facts["x-loraplex-worker"] = ", ".join(dict.fromkeys(worker_ids))
    return [(name.encode(), value.encode("latin-1", "replace")) for name, value in facts.items()]


def facts_object(facts: Sequence[generation_pb2.ServingFacts]) -> dict[str, Any]:
    """Return the `loraplex` object: of the one prompt, or one entry per prompt."""
    if len(facts) == 1:
        return _facts_of(facts[0])
    return {"prompts": [_facts_of(fact) for fact in facts]}


def _facts_of(facts: generation_pb2.ServingFacts) -> dict[str, Any]:
    tier = generation_pb2.AdapterTier.Name(facts.tier_hit).removeprefix("ADAPTER_TIER_").lower()
    return {
        "base_digest": facts.base_digest,
        "base_quantization": facts.base_quantization or "none",
        "version_digest": facts.version_digest or None,
        "artifact_digest": facts.artifact_digest or None,
        "tier_hit": tier if facts.tier_hit else None,
        "queue_s": facts.queue_time.ToNanoseconds() / 1e9,
        "adapter_load_s": facts.adapter_load_time.ToNanoseconds() / 1e9,
        "prefill_s": facts.prefill_time.ToNanoseconds() / 1e9,
        "decode_s": facts.decode_time.ToNanoseconds() / 1e9,
        "worker_id": facts.worker_id,
    }
