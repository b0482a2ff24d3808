"""What packing made of a version: sizes per format, and each module's error. Values and their JSON; pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PackingReport:
    """`errors` are (module, relative error of its weight), worst first; `sizes` are bytes of the file by format."""

    format: str
    sizes: Mapping[str, int]
    errors: tuple[tuple[str, float], ...]

    @property
    def mean_error(self) -> float:
        """Mean over the modules."""
        return sum(error for _, error in self.errors) / len(self.errors)


def encode_report(report: PackingReport) -> str:
    """Return the report as it is stored."""
    fields = {"format": report.format, "sizes": dict(report.sizes), "errors": report.errors}
    return json.dumps(fields, separators=(",", ":"))


def decode_report(payload: str) -> PackingReport | None:
    """Return what `encode_report` wrote; None where nothing is stored."""
    if not payload:
        return None
    fields = json.loads(payload)
    return PackingReport(fields["format"], fields["sizes"], tuple((name, error) for name, error in fields["errors"]))
