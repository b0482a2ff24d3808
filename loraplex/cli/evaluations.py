"""How evaluations are shown: a line for the current version, and columns for all of them."""

from __future__ import annotations

from collections.abc import Sequence

from loraplex.cli import output
from loraplex.records import AdapterVersion, Evaluation


def of_artifact(evaluations: Sequence[Evaluation], version: AdapterVersion) -> Evaluation | None:
    """Return what was measured of the artifact that a version is served in."""
    return next((entry for entry in evaluations if entry.artifact_digest == version.artifact_digest), None)


def in_words(evaluation: Evaluation) -> str:
    """Return an evaluation as a line for people."""
    return (
        f"{evaluation.top1_agreement:.2%} of {evaluation.num_positions} tokens as exact; KL {evaluation.mean_kl:.2g} "
        f"mean, {evaluation.max_kl:.2g} at most; {evaluation.num_prompts} prompts of set {evaluation.prompt_set}, "
        f"{evaluation.device}, {output.when(evaluation.create_time)}"
    )


def in_columns(evaluation: Evaluation | None) -> tuple[str, str]:
    """Return an evaluation's cells in a table of versions: agreement and mean divergence."""
    if evaluation is None:
        return "", ""
    return f"{evaluation.top1_agreement:.2%}", f"{evaluation.mean_kl:.2g}"
