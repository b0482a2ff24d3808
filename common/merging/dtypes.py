"""Float32 rows from and to what safetensors files store; bfloat16, which numpy lacks, as uint16 bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from common.adapter_format.parts import bfloat16_bits

STORED: Final[Mapping[str, np.dtype[Any]]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
"""Floats by their safetensors names."""
NAMES: Final[Mapping[str, str]] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def narrow(rows: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Return rows as they are stored, rounded to the nearest; infinite where the dtype's range ends."""
    if dtype == "BF16":
        return bfloat16_bits(rows)
    with np.errstate(over="ignore"):
        return rows.astype(STORED[dtype])
