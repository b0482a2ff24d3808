"""The model families that are served: what config.json says of them, for the registry and the worker to judge alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from loraplex.errors import InvalidBaseModel

ARCHITECTURES: Final[Mapping[str, str]] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Architecture by `model_type`. Each has a decoder in the worker."""


def check_family(config: Mapping[str, Any], *, inside: str = "") -> str:
    """Return the `model_type` of a config.json that names a family that is served.

    `architectures` may be absent, as other programs go by `model_type` too; what is there must be the family's. Raises
    InvalidBaseModel; the field at fault is config.json's own, or `inside` where the config came within another.
    """
    family, architectures = config.get("model_type"), config.get("architectures")
    if not isinstance(family, str) or family not in ARCHITECTURES:
        raise InvalidBaseModel(
            f"model_type {family!r:.80} is not supported; supported are {', '.join(ARCHITECTURES)}",
            field=inside or "model_type",
        )
    if architectures is not None and architectures != [ARCHITECTURES[family]]:
        raise InvalidBaseModel(
            f"architectures {architectures!r:.80} is not supported; a {family} model must say {ARCHITECTURES[family]}",
            field=inside or "architectures",
        )
    return family
