"""safetensors files, read strictly and written deterministically.

Reading maps the file and refuses anything but a header whose tensors cover the data exactly, without gaps, overlaps
or duplicate names: a truncated or damaged file never yields a tensor. Knows nothing of adapters.
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

from loraplex.errors import CorruptArtifact, UnsupportedAdapter

_MAX_HEADER_BYTES: Final = 16 * 2**20  # a thousand times what an adapter of a large model needs
_MAX_NAME_LENGTH: Final = 512
_ALIGNMENT: Final = 64
_ITEM_BITS: Final = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    "F4": 4,
}
# BF16 has no numpy type; its bits travel as uint16.
NUMPY_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor; `data` is a read-only view of the mapped file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def array(self) -> NDArray[Any]:
        """Return the tensor without a copy, read-only; BF16 as uint16 bits. Only for dtypes in NUMPY_DTYPES."""
        return np.frombuffer(self.data, dtype=NUMPY_DTYPES[self.dtype]).reshape(self.shape)


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
        size = stream.seek(0, 2)
        if size < 8:
            raise _corrupt(file, f"has {size} bytes; it is truncated or empty")
        mapped = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
    _refuse_pickle(file, bytes(mapped[:9]))
    length = int.from_bytes(mapped[:8], "little")
    if length > min(_MAX_HEADER_BYTES, size - 8):
        raise _corrupt(file, "is not a safetensors file, or its header is truncated")
    header = _parse_header(file, bytes(mapped[8 : 8 + length]))
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _corrupt(file, "has a damaged header: __metadata__ must map strings to strings")
    data = mapped[8 + length :]
    tensors, end = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: _offsets(file, *item)):
        start, stop = _offsets(file, name, entry)
        dtype, shape = entry["dtype"], entry["shape"]
        count = 1
        for dimension in shape:
            count *= dimension
        if start != end or (stop - start) * 8 != count * _ITEM_BITS[dtype]:
            raise _corrupt(file, f"has a damaged header: the bytes of {name} do not fit its shape and dtype", name)
        if stop > len(data):
            raise _corrupt(file, f"is truncated: {name} ends at byte {stop} of {len(data)}", name)
        tensors[name] = StoredTensor(name, dtype, tuple(shape), data[start:stop])
        end = stop
    if end != len(data):
        raise _corrupt(file, f"has {len(data) - end} bytes after its last tensor")
    return TensorFile(tensors, metadata)


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
        stream.write(np.ascontiguousarray(array).data.cast("B"))


def _parse_header(file: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) != len(pairs):
            raise ValueError("a name occurs twice")
        return dict(pairs)

    try:
        header = json.loads(raw.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise _corrupt(file, f"has a damaged header: {error}") from error
    if not isinstance(header, dict):
        raise _corrupt(file, "has a damaged header: it is not a JSON object")
    return header


def _offsets(file: Path, name: str, entry: Any) -> tuple[int, int]:
    """Return where the tensor's bytes start and stop, having checked its name and entry."""
    if len(name) > _MAX_NAME_LENGTH or not (name.isascii() and name.isprintable()):
        raise _corrupt(file, f"has a damaged header: {name[:40]!a}... is no tensor name")
    well_formed = isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "data_offsets"}
    well_formed = (
        well_formed
        and isinstance(entry["dtype"], str)
        and entry["dtype"] in _ITEM_BITS
        and all(
            isinstance(numbers, list) and all(type(n) is int and n >= 0 for n in numbers)
            for numbers in (entry["shape"], entry["data_offsets"])
        )
    )
    if not well_formed or len(entry["data_offsets"]) != 2 or entry["data_offsets"][0] > entry["data_offsets"][1]:
        raise _corrupt(file, f"has a damaged header: the entry of {name} is malformed", name)
    start, stop = entry["data_offsets"]
    return start, stop


def _refuse_pickle(file: Path, head: bytes) -> None:
    if head[8:9] != b"{" and (head.startswith(b"PK") or (head[:1] == b"\x80" and head[1:2] <= b"\x05")):
        raise UnsupportedAdapter(
            f"{file.name} is a pickle (a torch checkpoint), which can run code when loaded and is never opened; "
            "save the adapter as safetensors: save_pretrained(..., safe_serialization=True)",
            file=file.name,
        )


def _corrupt(file: Path, what: str, tensor: str | None = None) -> CorruptArtifact:
    if tensor is None:
        return CorruptArtifact(f"{file.name} {what}", file=file.name)
    return CorruptArtifact(f"{file.name} {what}", file=file.name, tensor=tensor)
