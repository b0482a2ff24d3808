"""DoRA as an affine of a module's output, from its magnitudes and the weights of the base.

PEFT computes y = b + m/‖W + sBA‖ ⊙ (Wx + sBAx), the norm over the inputs of each output feature (Liu et al. 2024,
"DoRA: Weight-Decomposed Low-Rank Adaptation"). Of a token embedding too: its outputs are the hidden features, and a
feature's inputs the whole vocabulary.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from common.adapter_format.base import BaseLinears
from common.adapter_format.base_weights import BaseWeights
from common.adapter_format.modules import EMBEDDING, PackedAffine, PackedModule
from common.adapter_format.parts import widen
from loraplex.errors import AdapterMismatch, InvalidAdapter

UNCHANGED: Final = 2.0**-8
"""Magnitudes as untrained ones are, which were perhaps computed and stored in 16 bits, are so near to their norms."""


def dora_affine(
    module: PackedModule, magnitude: NDArray[np.float32], base: BaseLinears, weights: BaseWeights
) -> PackedAffine:
    """Return what DoRA makes of a module's output. `magnitude` [out].

    Where a weight and its change are all zero, what is scaled is zero too, whatever the scale: it is 1 there. Raises
    InvalidAdapter, naming the module, where a scale is beyond float32.
    """
    norms = output_norms(module, base, weights)
    wide = np.ones(len(magnitude), np.float64)
    np.divide(magnitude, norms, out=wide, where=norms > 0)
    with np.errstate(over="ignore", invalid="ignore"):
        scale = wide.astype(np.float32)
        shift = np.zeros_like(scale)
        if bias := base.biases.get(module.name):
            shift = np.asarray((1 - wide) * _bias(bias.name, len(scale), weights), np.float32)
    if not (np.isfinite(scale) & np.isfinite(shift) & np.isfinite(norms)).all():
        raise InvalidAdapter(
            f"{module.name}: a weight with its change, or a DoRA magnitude over the norm of that, is beyond float32",
            field="use_dora",
            module=module.name,
        )
    return PackedAffine(scale, shift, magnitude)


def output_norms(module: PackedModule, base: BaseLinears, weights: BaseWeights) -> NDArray[np.float64]:
    """Return ‖W + sBA‖ over the inputs of each output feature, [out]. Streams W; float32, summed in float64."""
    a = widen(module.a, module.dtype)
    scaled_b = widen(module.b, module.dtype) * np.float32(module.scale)
    squares = np.zeros(module.out_features, np.float64)
    for start, block in weights.rows(base.weights[module.name].name):
        stop = start + len(block)
        _check_width(module, block)
        with np.errstate(over="ignore", invalid="ignore"):
            if module.name == EMBEDDING:  # its weight is [in, out]
                np.add(block, np.ascontiguousarray(a[:, start:stop].T) @ scaled_b.T, out=block)
                squares += np.square(block, out=block).sum(axis=0, dtype=np.float64)
            else:
                np.add(block, scaled_b[start:stop] @ a, out=block)
                squares[start:stop] = _row_squares(block)
    return np.asarray(np.sqrt(squares))


def _row_squares(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the sum of squares of each row: of 64 values in float32, which is three times as fast, then in float64."""
    step = 64 if rows.shape[1] % 64 == 0 else 1
    parts = rows.reshape(len(rows), -1, step)
    return np.asarray(np.einsum("rps,rps->rp", parts, parts).sum(axis=1, dtype=np.float64))


def _check_width(module: PackedModule, rows: NDArray[Any]) -> None:
    expected = module.out_features if module.name == EMBEDDING else module.in_features
    if rows.shape[1] != expected:
        raise AdapterMismatch(f"the base's weights of {module.name} have rows of {rows.shape[1]}, not {expected}")


def _bias(name: str, size: int, weights: BaseWeights) -> NDArray[np.float32]:
    bias = weights.vector(name)
    if len(bias) != size:
        raise AdapterMismatch(f"the base's {name} has {len(bias)} values, not {size}")
    return bias
