"""The header of a safetensors file, read strictly; neither torch nor numpy.

A file is whole or refused: names are unique and printable, every tensor's bytes fit its shape and dtype, and together
they are the data without gaps, as the format demands.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from loraplex.errors import CorruptArtifact

LENGTH_BYTES: Final = 8
_MAX_NAME_LENGTH: Final = 512
_MAX_DIMENSIONS: Final = 8  # a product of many large sizes would take hours to compute
_MAX_SIZE: Final = 2**63
_ITEM_BITS: Final = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    "F4": 4,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: its safetensors dtype, its shape, and where in the file its bytes start and stop."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """A header: tensors by name in the order of their data, and the file's own metadata."""

    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]


def read_header(file: Path, *, max_header_bytes: int) -> Header:
    """Read and check a file's header. Raises CorruptArtifact, naming the file, for what is not whole."""
    with file.open("rb") as stream:
        size = stream.seek(0, 2)
        if size < LENGTH_BYTES:
            raise _corrupt(file, f"has {size} bytes; it is truncated or empty")
        stream.seek(0)
        length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        if length > min(max_header_bytes, size - LENGTH_BYTES):
            raise _corrupt(file, "is not a safetensors file, or its header is truncated")
        header = _parse(file, stream.read(length))
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _corrupt(file, "has a damaged header: __metadata__ must map strings to strings")
    data = LENGTH_BYTES + length
    tensors: dict[str, TensorEntry] = {}
    end = 0
    in_order = sorted((*_offsets(file, name, entry), number) for number, (name, entry) in enumerate(header.items()))
    entries = list(header.items())
    for start, stop, number in in_order:
        name, entry = entries[number]
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        if start != end or (stop - start) * 8 != math.prod(shape) * _ITEM_BITS[dtype]:
            raise _corrupt(file, f"has a damaged header: the bytes of {name} do not fit its shape and dtype", name)
        if data + stop > size:
            raise _corrupt(file, f"is truncated: {name} ends at byte {stop} of {size - data}", name)
        tensors[name] = TensorEntry(dtype, shape, data + start, data + stop)
        end = stop
    if data + end != size:
        raise _corrupt(file, f"has {size - data - end} bytes after its last tensor")
    return Header(tensors, metadata)


def _parse(file: Path, raw: bytes) -> dict[str, Any]:
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
    """Return where the tensor's bytes start and stop in the data, having checked its name and entry."""
    if len(name) > _MAX_NAME_LENGTH or not (name.isascii() and name.isprintable()):
        raise _corrupt(file, f"has a damaged header: {name[:40]!a}... is no tensor name")
    well_formed = isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "data_offsets"}
    well_formed = (
        well_formed
        and isinstance(entry["dtype"], str)
        and entry["dtype"] in _ITEM_BITS
        and all(
            isinstance(numbers, list)
            and len(numbers) <= _MAX_DIMENSIONS
            and all(type(n) is int and 0 <= n < _MAX_SIZE for n in numbers)
            for numbers in (entry["shape"], entry["data_offsets"])
        )
    )
    if not well_formed or len(entry["data_offsets"]) != 2 or entry["data_offsets"][0] > entry["data_offsets"][1]:
        raise _corrupt(file, f"has a damaged header: the entry of {name} is malformed", name)
    start, stop = entry["data_offsets"]
    return start, stop


def _corrupt(file: Path, what: str, tensor: str | None = None) -> CorruptArtifact:
    if tensor is None:
        return CorruptArtifact(f"{file.name} {what}", file=file.name)
    return CorruptArtifact(f"{file.name} {what}", file=file.name, tensor=tensor)
