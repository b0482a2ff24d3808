"""Whether a tensor in an adapter's file is the base's own, told from the SHA-256 that the base's manifest has of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from common.adapter_format.base import BaseLinears
from common.adapter_format.base_weights import WeightsSource
from common.adapter_format.parts import bfloat16_bits, widen
from common.adapter_format.tensor_file import NUMPY_DTYPES, StoredTensor
from loraplex.errors import AdapterMismatch
from loraplex.manifest import TensorInfo

_STEP: Final = 2**22  # values converted at a time


def check_copies(
    copies: Mapping[tuple[str, str], StoredTensor], base: BaseLinears, weights: WeightsSource
) -> list[str]:
    """Check that what a file has of the base, by (module, "weight" or "bias"), is the base's own; return their names.

    Raises AdapterMismatch, naming the tensor, and what `weights` does.
    """
    for (module, parameter), tensor in copies.items():
        own = (base.weights if parameter == "weight" else base.biases).get(module)
        if own is None or not (is_same(tensor, own) or is_rounded(tensor, own, weights)):
            why = (
                "its values differ; register the base that the adapter was trained on or, where the module was trained "
                "itself, list it in modules_to_save"
            )
            if own is not None and tensor.shape != own.shape:
                why = (
                    f"it has shape {list(tensor.shape)}, the base {list(own.shape)}; an adapter with a resized "
                    "vocabulary cannot be served"
                )
            raise AdapterMismatch(
                f"{tensor.name} is not the base's own {module}: {why}",
                tensor=tensor.name,
                field="modules_to_save",
            )
    return [tensor.name for tensor in copies.values()]


def is_same(tensor: StoredTensor, base: TensorInfo) -> bool:
    """Tell whether `tensor` holds exactly the numbers of the base's; it may hold them in a wider dtype."""
    if tensor.shape != base.shape:
        return False
    if tensor.dtype == base.dtype:
        return hashlib.sha256(tensor.data).hexdigest() == base.sha256
    if tensor.dtype != "F32" or base.dtype not in NUMPY_DTYPES:
        return False
    digest = hashlib.sha256()
    for values in _steps(tensor):
        narrow = narrowed(values, base.dtype)
        if not np.array_equal(widen(narrow, base.dtype), values):
            return False
        digest.update(narrow.data.cast("B"))
    return digest.hexdigest() == base.sha256


def is_rounded(tensor: StoredTensor, base: TensorInfo, weights: WeightsSource) -> bool:
    """Tell whether `tensor` is the base's matrix rounded to fewer bits, as where a float32 base was trained on in 16.

    `weights` are asked for only where they may tell.
    """
    if tensor.shape != base.shape or len(base.shape) != 2 or tensor.dtype not in {"BF16", "F16"} - {base.dtype}:
        return False
    stored = tensor.array()
    blocks = weights(f"{tensor.name}, a copy of the base's {base.name} in other precision,").rows(base.name)
    return all(
        np.array_equal(narrowed(rows, tensor.dtype), stored[start : start + len(rows)]) for start, rows in blocks
    )


def narrowed(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Return float32 values in `dtype`, rounded to nearest even; BF16 as uint16 bits."""
    if dtype == "BF16":
        return bfloat16_bits(values)
    with np.errstate(over="ignore"):
        return values.astype(NUMPY_DTYPES[dtype])


def _steps(tensor: StoredTensor) -> list[NDArray[np.float32]]:
    values = tensor.array().reshape(-1)
    return [values[start : start + _STEP] for start in range(0, values.size, _STEP)]
