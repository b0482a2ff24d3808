"""From a live PEFT model to the packed adapter that it is, without files: every kind that a packed adapter can hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from common.adapter_format.packed import PackedAdapter, PackedAffine, PackedMatrix, PackedModule


def packed_from_peft(model: Any, base_digest: str, *, name: str = "default") -> PackedAdapter:
    """Return the adapter `name` of a PeftModel in format none, float32. DoRA and LoRA biases become affines."""
    modules, matrices = [], []
    for path, layer in model.base_model.model.named_modules():
        canonical = path.removeprefix("model.")
        if name in getattr(layer, "lora_A", {}):
            modules.append(_linear(canonical, layer, name))
        elif name in getattr(layer, "lora_embedding_A", {}):
            a, b = layer.lora_embedding_A[name], layer.lora_embedding_B[name]
            modules.append(_module(canonical, layer.scaling[name], _array(a), _array(b), None))
        elif name in getattr(layer, "modules_to_save", {}):
            matrices.append(PackedMatrix(canonical, "F32", _array(layer.modules_to_save[name].weight)))
    modules.sort(key=lambda module: module.name)
    return PackedAdapter("5" * 64, base_digest, "none", tuple(modules), tuple(matrices))


def _linear(path: str, layer: Any, name: str) -> PackedModule:
    a, b, scale = layer.lora_A[name].weight, layer.lora_B[name], layer.scaling[name]
    affine = None
    magnitudes = getattr(layer, "lora_magnitude_vector", {})
    if name in magnitudes:
        weight = layer.get_base_layer().weight + scale * b.weight @ a
        gain = magnitudes[name].weight / weight.norm(dim=1)
        bias = layer.get_base_layer().bias
        shift = torch.zeros_like(gain) if bias is None else (1 - gain) * bias
        affine = PackedAffine(_array(gain), _array(shift))
    elif b.bias is not None:
        affine = PackedAffine(np.ones(len(b.bias), np.float32), _array(scale * b.bias))
    return _module(path, scale, _array(a), _array(b.weight), affine)


def _module(name: str, scale: float, a: NDArray[Any], b: NDArray[Any], affine: PackedAffine | None) -> PackedModule:
    return PackedModule(name, len(a), float(scale), "F32", a, b, affine=affine)


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    return tensor.detach().float().numpy()
