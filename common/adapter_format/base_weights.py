"""The weights of a base where they are needed to pack an adapter: streamed from its folder a block at a time.

Knows nothing of adapters; whether the folder holds the right base is its owner's to check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from common.adapter_format.parts import widen
from common.adapter_format.tensor_file import NUMPY_DTYPES
from loraplex.errors import FailedPrecondition, InvalidBaseModel
from loraplex.manifest import MAX_HEADER_BYTES, weight_files
from loraplex.safetensors_header import TensorEntry, read_header

_BLOCK_VALUES: Final = 2**19  # read at a time; as float32 they stay in the caches


class BaseWeights:
    """Reads tensors of a Hugging Face folder by their names, sharded or not. Blocks; keeps no weights."""

    def __init__(self, entries: Mapping[str, tuple[Path, TensorEntry]]) -> None:
        self._entries = entries

    @classmethod
    def open(cls, folder: Path) -> BaseWeights:
        """Read the headers of the folder's files. Raises InvalidBaseModel or CorruptArtifact."""
        return cls(
            {
                name: (file, entry)
                for file in weight_files(folder)
                for name, entry in read_header(file, max_header_bytes=MAX_HEADER_BYTES).tensors.items()
            }
        )

    def rows(self, name: str) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yield (first row, rows) of a matrix [n, m] in float32; the rows are the caller's to write to.

        Raises InvalidBaseModel where it is not a matrix.
        """
        file, entry = self._entry(name, 2)
        num_rows, width = entry.shape
        step = max(1, _BLOCK_VALUES // max(1, width))
        for start in range(0, num_rows, step):
            stop = min(start + step, num_rows)
            yield start, _read(file, entry, start * width, stop * width).reshape(stop - start, width)

    def vector(self, name: str) -> NDArray[np.float32]:
        """Return a vector in float32. Raises InvalidBaseModel where it is none."""
        file, entry = self._entry(name, 1)
        return _read(file, entry, 0, entry.shape[0])

    def _entry(self, name: str, dimensions: int) -> tuple[Path, TensorEntry]:
        file, entry = self._entries.get(name, (None, None))
        if file is None or entry is None or len(entry.shape) != dimensions or entry.dtype not in NUMPY_DTYPES:
            raise InvalidBaseModel(
                f"the base's weights hold no tensor {name} of {dimensions} dimensions in {', '.join(NUMPY_DTYPES)}",
                field="base",
                tensor=name,
            )
        return file, entry


def _read(file: Path, entry: TensorEntry, start: int, stop: int) -> NDArray[np.float32]:
    dtype: np.dtype[Any] = NUMPY_DTYPES[entry.dtype]
    values = np.fromfile(file, dtype, stop - start, offset=entry.start + start * dtype.itemsize)
    if len(values) != stop - start:
        raise InvalidBaseModel(f"{file.name} ends too early; it has changed meanwhile", field="base")
    if entry.dtype != "BF16":
        return widen(values, entry.dtype)
    bits = values.astype(np.uint32)
    bits <<= 16  # in place: a third of the time
    return bits.view(np.float32)


WeightsSource = Callable[[str], BaseWeights]
"""Returns the weights of the base that an adapter is for; the argument says what needs them, for the refusal."""


def no_weights(needed_for: str) -> BaseWeights:
    """Refuse, as there are none. Raises FailedPrecondition."""
    raise FailedPrecondition(
        f"{needed_for} needs the weights of the base model, and none are given", field="base", needed_for=needed_for
    )
