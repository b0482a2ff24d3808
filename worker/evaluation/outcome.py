"""What an evaluation tells: how far it is, then its figures."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

from worker.mailbox import Ready


@dataclass(frozen=True, slots=True)
class Progress:
    """Prompts that are done, of all."""

    done_prompts: int
    total_prompts: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was measured, of what, by what; digests in lower-case hex, divergences in nats."""

    version_digest: str
    artifact_digest: str
    exact_artifact_digest: str
    base_digest: str
    prompt_set: int
    num_prompts: int
    num_positions: int
    top1_agreement: float
    mean_kl: float
    max_kl: float
    worker_version: str
    device: str


def software_version() -> str:
    """Return this software's version."""
    try:
        return metadata.version("loraplex")
    except metadata.PackageNotFoundError:  # run from a tree that nobody installed
        return "unknown"


def computed_in(ready: Ready) -> str:
    """Return where and in what an engine computes, for people: "cpu bfloat16, int8 base"."""
    base = "" if ready.base_quantization == "none" else f", {ready.base_quantization} base"
    return f"{ready.device} {ready.dtype}{base}"
