"""What became of an uploaded file: how much of it is served, what was left out and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from common.adapter_format.modules import EMBEDDING, HEAD, PackedAdapter

MIXED_RANKS: Final = "mixed ranks"
RSLORA: Final = "rsLoRA"
DORA: Final = "DoRA"
LORA_BIAS: Final = "LoRA bias"
EMBEDDING_LORA: Final = "embed_tokens LoRA"
HEAD_LORA: Final = "lm_head LoRA"
SAVED: Final = "saved "
"""Before the name of a matrix that stands in for the base's."""

BY_MANIFEST: Final = "manifest"
"""The base was told by its registered manifest: shapes of all modules, SHA-256 of what the file holds of the base."""
BY_WEIGHTS: Final = "weights"
"""The base's own weights were read besides, from a folder with the digest of the registered base."""


@dataclass(frozen=True, slots=True)
class LoadFacts:
    """Facts of one uploaded adapter; what is not counted as dropped is served."""

    num_file_tensors: int
    num_file_modules: int
    """Modules of the base that the file has tensors for."""
    equal_to_base: tuple[str, ...]
    """Tensors of the file that are the base's own, and therefore dropped."""
    features: tuple[str, ...]
    """Kinds of things beside plain LoRA that the adapter has, as named above."""
    base_check: str
    """BY_MANIFEST or BY_WEIGHTS."""
    trained_on: str
    """What adapter_config.json calls its base; not checked, as names are not."""


def features_of(adapter: PackedAdapter, *, rslora: bool) -> tuple[str, ...]:
    """Return what an exact adapter has beside plain LoRA of one rank."""
    names = {module.name for module in adapter.modules}
    affines = [module.affine for module in adapter.modules if module.affine is not None]
    has = {
        MIXED_RANKS: len({(module.rank, module.scale) for module in adapter.modules}) > 1,
        RSLORA: rslora,
        DORA: any(affine.magnitude is not None for affine in affines),
        LORA_BIAS: any(affine.magnitude is None for affine in affines),
        EMBEDDING_LORA: EMBEDDING in names,
        HEAD_LORA: HEAD in names,
    } | {f"{SAVED}{matrix.name}": True for matrix in adapter.matrices}
    return tuple(feature for feature, present in has.items() if present)
