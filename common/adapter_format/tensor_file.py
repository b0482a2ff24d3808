"""safetensors files, mapped and written deterministically: the same tensors always give the same bytes.

A truncated or damaged file never yields a tensor (see `loraplex.safetensors_header`), and a pickle is never opened.
Knows nothing of LoRA.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from loraplex.errors import UnsupportedAdapter
from loraplex.safetensors_header import read_header

MAX_HEADER_BYTES: Final = 16 * 2**20  # a thousand times what an adapter of a large model needs
_ALIGNMENT: Final = 64
# BF16 has no numpy type; its bits travel as uint16.
NUMPY_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
# Packed files hold these besides.
_ALL_DTYPES: Final = {**NUMPY_DTYPES, "I8": np.dtype(np.int8), "U8": np.dtype(np.uint8)}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor; `data` is a read-only view of the mapped file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def array(self) -> NDArray[Any]:
        """Return the tensor without a copy, read-only; BF16 as uint16 bits. Only for NUMPY_DTYPES, I8 and U8."""
        return np.frombuffer(self.data, dtype=_ALL_DTYPES[self.dtype]).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A mapped file: tensors by name, in the order of their data."""

    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]


def open_tensors(file: Path) -> TensorFile:
    """Map a safetensors file.

    Raises UnsupportedAdapter for a pickle and CorruptArtifact for anything else that is not whole; both name the file.
    """
    with file.open("rb") as stream:
        _refuse_pickle(file, stream.read(9))
        header = read_header(file, max_header_bytes=MAX_HEADER_BYTES)
        mapped = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
    tensors = {
        name: StoredTensor(name, entry.dtype, entry.shape, mapped[entry.start : entry.stop])
        for name, entry in header.tensors.items()
    }
    return TensorFile(tensors, header.metadata)


def write_tensors(
    stream: BinaryIO, tensors: Sequence[tuple[str, str, NDArray[Any]]], metadata: Mapping[str, str]
) -> None:
    """Write (name, dtype, array) triples: the same tensors and metadata always give the same bytes.

    Data lies by falling item size, then by name, from a multiple of 64 bytes on, so every tensor is aligned.
    """
    ordered = sorted(tensors, key=lambda tensor: (-tensor[2].itemsize, tensor[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, dtype, array in ordered:
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    raw = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    raw += b" " * (-(8 + len(raw)) % _ALIGNMENT)
    stream.write(len(raw).to_bytes(8, "little"))
    stream.write(raw)
    for _, _, array in ordered:
        if array.size:
            stream.write(np.ascontiguousarray(array).data.cast("B"))


def _refuse_pickle(file: Path, head: bytes) -> None:
    if head[8:9] != b"{" and (head.startswith(b"PK") or (head[:1] == b"\x80" and head[1:2] <= b"\x05")):
        raise UnsupportedAdapter(
            f"{file.name} is a pickle (a torch checkpoint), which can run code when loaded and is never opened; "
            "save the adapter as safetensors: save_pretrained(..., safe_serialization=True)",
            file=file.name,
        )
