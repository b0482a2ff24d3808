"""What became of an adapter's uploaded file, in words."""

from __future__ import annotations

from typing import Final

from loraplex.records import LoadFacts

_CHECKED_BY: Final = {
    "manifest": "shapes and SHA-256 from the base's manifest",
    "weights": "the base's weights, by their digest",
}


def in_lines(load: LoadFacts) -> list[tuple[str, str]]:
    """Return (label, text) lines."""
    lines = [("file", f"{load.num_file_tensors} tensors of {load.num_file_modules} modules")]
    if load.equal_to_base:
        lines.append(("dropped", f"{', '.join(load.equal_to_base)}: the same as the base's"))
    if load.features:
        lines.append(("has", ", ".join(load.features)))
    named = f"; trained on {load.trained_on}, by its own account" if load.trained_on else ""
    lines.append(("base", f"checked by {_CHECKED_BY.get(load.base_check, 'its digest')}{named}"))
    return lines
