"""Where an adapter can sit on a base model: its modules by canonical name, from the names and shapes of its tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from common.adapter_format.modules import EMBEDDING, HEAD
from loraplex.manifest import BaseManifest, TensorInfo

KINDS: Final = {
    "q_proj": "self_attn",
    "k_proj": "self_attn",
    "v_proj": "self_attn",
    "o_proj": "self_attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
}
OUTSIDE: Final[Mapping[str, str]] = {EMBEDDING: f"model.{EMBEDDING}", HEAD: HEAD}
"""The modules outside the layers, and what they are called in a model."""
EMBEDDING_WEIGHT: Final = f"{OUTSIDE[EMBEDDING]}.weight"
HEAD_WEIGHT: Final = f"{OUTSIDE[HEAD]}.weight"
_PARAMETER: Final = re.compile(r"model\.(layers\.(?:0|[1-9]\d{0,5})\.(self_attn|mlp)\.(\w+))\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class BaseLinears:
    """What of a base an adapter can change, and the base's digest.

    `shapes` are the linears of its layers, {"layers.0.self_attn.q_proj": (out, in)}; `outside` are embedding and head
    alike, {"embed_tokens": (hidden, vocabulary), "lm_head": (vocabulary, hidden)}.
    """

    base_digest: str
    shapes: Mapping[str, tuple[int, int]]
    outside: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    weights: Mapping[str, TensorInfo] = field(default_factory=dict)
    """The tensor with each module's weight; with tied embeddings the head's is the embedding's."""
    biases: Mapping[str, TensorInfo] = field(default_factory=dict)
    """The tensor with a module's bias, where it has one."""
    all_modules: frozenset[str] = frozenset()
    """All modules by their names in a model, those that cannot be changed included."""

    @property
    def num_layers(self) -> int:
        """Layers that have linears."""
        return len({layer_of(module) for module in self.shapes})

    def shape_of(self, module: str) -> tuple[int, int] | None:
        """Return (out, in) of a module by its canonical name, None where the base has no such."""
        return self.shapes.get(module) or self.outside.get(module)


def read_linears(manifest: BaseManifest) -> BaseLinears:
    """Collect the modules that a manifest names."""
    shapes: dict[str, tuple[int, int]] = {}
    weights: dict[str, TensorInfo] = {}
    biases: dict[str, TensorInfo] = {}
    by_name = {tensor.name: tensor for tensor in manifest.tensors}
    for name, tensor in by_name.items():
        match = _PARAMETER.fullmatch(name)
        if match is None or KINDS.get(match[3]) != match[2]:
            continue
        if match[4] == "bias":
            biases[match[1]] = tensor
        elif len(tensor.shape) == 2:
            shapes[match[1]] = (tensor.shape[0], tensor.shape[1])
            weights[match[1]] = tensor
    outside: dict[str, tuple[int, int]] = {}
    embedding = by_name.get(EMBEDDING_WEIGHT)
    head = embedding if _is_tied(manifest) else by_name.get(HEAD_WEIGHT)
    for module, matrix in ((EMBEDDING, embedding), (HEAD, head)):
        if matrix is not None and len(matrix.shape) == 2:
            vocabulary, hidden = matrix.shape
            outside[module] = (hidden, vocabulary) if module == EMBEDDING else (vocabulary, hidden)
            weights[module] = matrix
    return BaseLinears(manifest.digest(), shapes, outside, weights, biases, _all_modules(by_name, outside))


def layer_of(module: str) -> int:
    """Return 3 for "layers.3.self_attn.q_proj"."""
    return int(module.split(".")[1])


def kind_of(module: str) -> str:
    """Return "q_proj" for "layers.3.self_attn.q_proj", and embedding and head as they are."""
    return module.rsplit(".", 1)[-1]


def full_name(module: str) -> str:
    """Return what a module is called in a model: "model.layers.3.self_attn.q_proj" for "layers.3.self_attn.q_proj"."""
    return OUTSIDE.get(module) or f"model.{module}"


def _is_tied(manifest: BaseManifest) -> bool:
    """Tell whether the head is the embedding's matrix; a file may hold it twice then."""
    try:
        config: Any = manifest.config
    except (ValueError, RecursionError):
        return False
    return isinstance(config, dict) and bool(config.get("tie_word_embeddings", False))


def _all_modules(tensors: Mapping[str, TensorInfo], outside: Mapping[str, Any]) -> frozenset[str]:
    found = {OUTSIDE[module] for module in outside}
    for tensor in tensors:
        parts = tensor.split(".")[:-1]
        found |= {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    return frozenset(found)
