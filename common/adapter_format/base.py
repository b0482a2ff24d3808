"""Where a LoRA can sit on a base model: its linears by canonical name, from the names and shapes of its tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from loraplex.manifest import BaseManifest

KINDS: Final = {
    "q_proj": "self_attn",
    "k_proj": "self_attn",
    "v_proj": "self_attn",
    "o_proj": "self_attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
}
_LINEAR: Final = re.compile(r"model\.(layers\.(?:0|[1-9]\d{0,5})\.(self_attn|mlp)\.(\w+))\.weight")


@dataclass(frozen=True, slots=True)
class BaseLinears:
    """The linears of a base's layers: {"layers.0.self_attn.q_proj": (out, in)}, and the base's digest."""

    base_digest: str
    shapes: Mapping[str, tuple[int, int]]

    @property
    def num_layers(self) -> int:
        """Layers that have linears."""
        return len({layer_of(module) for module in self.shapes})


def read_linears(manifest: BaseManifest) -> BaseLinears:
    """Collect the linears that a manifest names."""
    shapes = {}
    for tensor in manifest.tensors:
        match = _LINEAR.fullmatch(tensor.name)
        if match and KINDS.get(match[3]) == match[2] and len(tensor.shape) == 2:
            shapes[match[1]] = (tensor.shape[0], tensor.shape[1])
    return BaseLinears(manifest.digest(), shapes)


def layer_of(module: str) -> int:
    """Return 3 for "layers.3.self_attn.q_proj"."""
    return int(module.split(".")[1])


def kind_of(module: str) -> str:
    """Return "q_proj" for "layers.3.self_attn.q_proj"."""
    return module.rsplit(".", 1)[1]
