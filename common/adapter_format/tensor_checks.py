"""What any tensor of an adapter must be: of the expected shape, of a dtype that is served, and finite."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from common.adapter_format.tensor_file import NUMPY_DTYPES, StoredTensor
from loraplex.errors import AdapterMismatch, CorruptArtifact, UnsupportedAdapter

_STEP: Final = 2**24  # values looked at a time: a whole output head would take its own size again


def check_shape(tensor: StoredTensor, expected: tuple[int, ...], because: str) -> None:
    """Raise AdapterMismatch where the tensor has another shape; `because` says why it should have this one."""
    if tensor.shape != expected:
        raise AdapterMismatch(
            f"{tensor.name} has shape {list(tensor.shape)}, expected {list(expected)}: {because}",
            tensor=tensor.name,
            expected=list(expected),
            actual=list(tensor.shape),
        )


def check_dtype(tensor: StoredTensor) -> None:
    """Raise UnsupportedAdapter where the tensor is not of a dtype that is served."""
    if tensor.dtype not in NUMPY_DTYPES:
        raise UnsupportedAdapter(
            f"{tensor.name} is stored as {tensor.dtype}; save it as one of {', '.join(NUMPY_DTYPES)}",
            tensor=tensor.name,
            expected="/".join(NUMPY_DTYPES),
            actual=tensor.dtype,
        )


def check_finite(tensor: StoredTensor) -> None:
    """Raise CorruptArtifact where the tensor has NaN or infinity."""
    values: NDArray[Any] = tensor.array().reshape(-1)
    for start in range(0, values.size, _STEP):
        some = values[start : start + _STEP]
        # Of BF16, which comes as bits: an exponent of all ones is infinity or NaN.
        bad = ((some & 0x7F80) == 0x7F80).any() if tensor.dtype == "BF16" else not np.isfinite(some).all()
        if bad:
            raise CorruptArtifact(
                f"{tensor.name} contains NaN or infinity; the training diverged or the file is damaged",
                tensor=tensor.name,
            )
