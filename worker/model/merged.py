"""The base as a dedicated worker loads it: with one adapter's factors folded into its weights."""

from __future__ import annotations

import json
from pathlib import Path

from common.adapter_format.packed import open_packed
from common.merging.changes import Changes, plan_changes
from loraplex.errors import BaseMismatch
from loraplex.manifest import MAX_HEADER_BYTES, weight_files
from loraplex.safetensors_header import read_header


def read_merge(base_dir: Path, base_digest: str, artifact: Path) -> Changes:
    """Return what the packed adapter at `artifact` makes of the base in `base_dir`, whose digest is given.

    Raises BaseMismatch, CorruptArtifact, AdapterMismatch, or UnsupportedAdapter for one that no model of the base's
    family can hold.
    """
    adapter = open_packed(artifact)
    if adapter.base_digest != base_digest:
        raise BaseMismatch(
            f"the adapter was packed for base {adapter.base_digest[:12]}, this worker serves {base_digest[:12]}; "
            "register it again on this base",
            expected=base_digest,
            actual=adapter.base_digest,
        )
    shapes = {
        name: entry.shape
        for file in weight_files(base_dir)
        for name, entry in read_header(file, max_header_bytes=MAX_HEADER_BYTES).tensors.items()
    }
    config = json.loads((base_dir / "config.json").read_text(encoding="utf-8"))
    return plan_changes(adapter, config, shapes)
