"""What a packed adapter computes by its definition, on the plain model of transformers in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from common.adapter_format.modules import EMBEDDING, HEAD, PackedAdapter, PackedModule
from common.adapter_format.parts import dequantize, widen
from tests.peft_variants import PROMPTS, load_base, model_logits


def packed_logits(base_folder: Path, adapter: PackedAdapter) -> list[NDArray[Any]]:
    """Return the logits of PROMPTS with a packed adapter of any format."""
    model = load_base(base_folder)
    for matrix in adapter.matrices:  # one of two tied matrices leaves the other as it is
        owner = model.lm_head if matrix.name == HEAD else model.model.embed_tokens
        owner.weight = torch.nn.Parameter(torch.from_numpy(widen(matrix.weight, matrix.dtype)))
    for module in adapter.modules:
        name = HEAD if module.name == HEAD else f"model.{module.name}"
        model.get_submodule(name).register_forward_hook(_hook(module))
    return model_logits(model, PROMPTS)


def _hook(module: PackedModule) -> Any:
    parts = [tuple(torch.from_numpy(np.ascontiguousarray(f)) for f in dequantize(part)) for part in module.parts]

    def change(_: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        for a, b in parts:
            output = output + (a.T[inputs[0]] if module.name == EMBEDDING else inputs[0] @ a.T) @ b.T
        if module.affine is not None:
            scale, shift = torch.tensor(module.affine.scale), torch.tensor(module.affine.shift)
            output = scale * output + shift
        return output

    return change


def relative_error(actual: list[NDArray[Any]], expected: list[NDArray[Any]]) -> float:
    """Return the largest |difference| of any prompt over its largest |logit|."""
    return max(float(np.abs(a - e).max() / np.abs(e).max()) for a, e in zip(actual, expected, strict=True))
