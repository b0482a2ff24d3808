"""The tiny bases of `peft_variants` as the registry knows them, and uploads checked against them."""

from __future__ import annotations

from pathlib import Path

from common.adapter_format.base import BaseLinears, read_linears
from common.adapter_format.base_weights import BaseWeights, WeightsSource
from common.adapter_format.validate import WEIGHTS_FILE, Validated, examine
from loraplex.manifest import read_manifest
from tests.peft_variants import BASES, write_base

Base = tuple[Path, BaseLinears]
"""A base's folder, and what its manifest tells."""


def make_bases(folder: Path) -> dict[str, Base]:
    """Write all bases and return them by kind."""
    made = {kind: write_base(kind, folder / kind) for kind in BASES}
    return {kind: (path, read_linears(read_manifest(path))) for kind, path in made.items()}


def examined(folder: Path, base: Base, weights: WeightsSource | None = None) -> Validated:
    """Check a PEFT folder; `weights` stand in for the base's own."""
    config = (folder / "adapter_config.json").read_bytes()
    return examine(config, folder / WEIGHTS_FILE, base[1], weights or (lambda _: BaseWeights.open(base[0])))
