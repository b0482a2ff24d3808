"""What packing made of a version: sizes and errors by format, and each module's error. Values and their JSON; pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from common.adapter_format.load_facts import LoadFacts


@dataclass(frozen=True, slots=True)
class PackingReport:
    """`errors` are (module, relative error of its weight), worst first; `sizes` are bytes of the file by format."""

    format: str
    sizes: Mapping[str, int]
    errors: tuple[tuple[str, float], ...]
    estimated_errors: Mapping[str, float] = field(default_factory=dict)
    """About the mean error in formats that it is not packed in, from a few modules; absent where it does not fit."""
    facts: LoadFacts | None = None
    """What became of the uploaded file; None where that was before it was told."""

    @property
    def mean_error(self) -> float:
        """Mean over the modules."""
        return sum(error for _, error in self.errors) / max(1, len(self.errors))

    @property
    def mean_errors(self) -> Mapping[str, float]:
        """Mean error by format: of its own, and what is estimated of others."""
        return {**self.estimated_errors, self.format: self.mean_error}


def encode_report(report: PackingReport) -> str:
    """Return the report as it is stored."""
    fields: dict[str, Any] = {"format": report.format, "sizes": dict(report.sizes), "errors": report.errors}
    fields["estimated_errors"] = dict(report.estimated_errors)
    if report.facts is not None:
        fields["facts"] = asdict(report.facts)
    return json.dumps(fields, separators=(",", ":"))


def decode_report(payload: str) -> PackingReport | None:
    """Return what `encode_report` wrote, or an older registry; None where nothing is stored."""
    if not payload:
        return None
    fields = json.loads(payload)
    return PackingReport(
        fields["format"],
        fields["sizes"],
        tuple((name, error) for name, error in fields["errors"]),
        fields.get("estimated_errors", {}),
        _decode_facts(fields.get("facts")),
    )


def _decode_facts(fields: Mapping[str, Any] | None) -> LoadFacts | None:
    if fields is None:
        return None
    return LoadFacts(
        num_file_tensors=fields["num_file_tensors"],
        num_file_modules=fields["num_file_modules"],
        equal_to_base=tuple(fields["equal_to_base"]),
        features=tuple(fields["features"]),
        base_check=fields["base_check"],
        trained_on=fields["trained_on"],
    )
