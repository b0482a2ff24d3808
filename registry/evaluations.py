"""What a worker measured of an artifact: values, the checks on what comes in, and their JSON. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

from common.adapter_format.parts import FORMAT_NONE
from common.wording import shown
from loraplex.errors import InvalidParameter
from registry.domain import AdapterRecord, VersionRecord

_MAX_WORDS: Final = 100
_MAX_COUNT: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Figures:
    """How near an artifact's answers are to those of the exact factors; see loraplex.types.v1.Evaluation."""

    exact_artifact_digest: str
    prompt_set: int
    num_prompts: int
    num_positions: int
    top1_agreement: float
    mean_kl: float
    max_kl: float
    worker_version: str
    device: str


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """The figures of one artifact; `format` is what it was measured in."""

    version_digest: str
    artifact_digest: str
    format: str
    figures: Figures
    create_time_us: int


def check_figures(figures: Figures) -> Figures:
    """Return figures that can be true. Raises InvalidParameter, naming the field."""
    for field in ("prompt_set", "num_prompts", "num_positions"):
        _check(field, getattr(figures, field), lambda value: 1 <= value <= _MAX_COUNT, "1 or more")
    if figures.num_prompts > figures.num_positions:
        raise InvalidParameter(
            f"{figures.num_prompts} prompts cannot have {figures.num_positions} positions; each has one at least",
            field="evaluation.num_prompts",
        )
    _check("top1_agreement", figures.top1_agreement, lambda value: 0 <= value <= 1, "0 to 1")
    for field in ("mean_kl", "max_kl"):
        _check(field, getattr(figures, field), lambda value: math.isfinite(value) and value >= 0, "finite, 0 or more")
    if figures.mean_kl > figures.max_kl * (1 + 1e-9):
        raise InvalidParameter(
            f"mean_kl {figures.mean_kl:g} is above max_kl {figures.max_kl:g}; a mean is not", field="evaluation.mean_kl"
        )
    for field in ("worker_version", "device"):
        value = getattr(figures, field)
        if not (value.isprintable() and len(value) <= _MAX_WORDS):
            raise InvalidParameter(
                f"{field} is {shown(value)}; give at most {_MAX_WORDS} printable characters",
                field=f"evaluation.{field}",
            )
    return figures


def _check(field: str, value: float, is_right: Callable[[float], bool], wanted: str) -> None:
    if not is_right(value):  # NaN is never right
        raise InvalidParameter(f"{field} is {value:g}; it must be {wanted}", field=f"evaluation.{field}")


def evaluated_version(
    adapter: AdapterRecord, *, version_digest: str, artifact_digest: str, exact_artifact_digest: str, base_digest: str
) -> tuple[VersionRecord, str]:
    """Return the version that an evaluation is of, and its artifact's format. Raises InvalidParameter for another's."""
    version = next((v for v in adapter.versions if v.version_digest == version_digest), None)
    if version is None:
        raise _foreign("version_digest", version_digest, f"is no version of {adapter.name}")
    if artifact_digest not in (version.artifact_digest, version.source_digest):
        raise _foreign(
            "artifact_digest", artifact_digest, "is no present artifact of that version; it may have been packed anew"
        )
    if exact_artifact_digest != version.source_digest:
        raise _foreign("exact_artifact_digest", exact_artifact_digest, "does not hold the version's exact factors")
    if base_digest != version.base_digest:
        raise _foreign("base_digest", base_digest, "is not the base that the version was validated on")
    return version, version.format if artifact_digest == version.artifact_digest else FORMAT_NONE


def _foreign(field: str, digest: str, why: str) -> InvalidParameter:
    return InvalidParameter(
        f"{field} {shown(digest[:12])} {why}; evaluate the adapter again", field=f"evaluation.{field}"
    )


def encode_figures(figures: Figures) -> str:
    """Return figures as they are stored."""
    return json.dumps(asdict(figures), separators=(",", ":"), sort_keys=True)


def decode_figures(payload: str) -> Figures:
    """Return what `encode_figures` wrote."""
    fields: dict[str, Any] = json.loads(payload)
    return Figures(**fields)
