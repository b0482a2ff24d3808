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
from typing import Any, Final, TypeGuard

from loraplex.errors import CorruptArtifact

LENGTH_BYTES: Final = 8
_MAX_NAME_LENGTH: Final = 512
_MAX_DIMENSIONS: Final = 8  # a product of many large sizes would take hours to compute
_MAX_SIZE: Final = 2**63
_FIELDS: Final = ("dtype", "shape", "data_offsets")
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
    checked = [(*_check(file, name, entry), name) for name, entry in header.items()]
    for start, stop, shape, dtype, name in sorted(checked):
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
    def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        unique = dict(pairs)
        if len(unique) != len(pairs):
            raise ValueError("a name occurs twice")
        return unique

    try:
        header = json.loads(raw.decode(), object_pairs_hook=without_repeats)
    except (ValueError, RecursionError) as error:
        raise _corrupt(file, f"has a damaged header: {error}") from error
    if not isinstance(header, dict):
        raise _corrupt(file, "has a damaged header: it is not a JSON object")
    return header


def _check(file: Path, name: str, entry: Any) -> tuple[int, int, tuple[int, ...], str]:
    """Check a tensor's name and entry, and return where its bytes start and stop in the data, its shape and dtype."""
    if len(name) > _MAX_NAME_LENGTH or not (name.isascii() and name.isprintable()):
        raise _corrupt(file, f"has a damaged header: {name[:40]!a}... is no tensor name")
    if type(entry) is dict and len(entry) == len(_FIELDS):
        dtype, shape, offsets = [entry.get(field) for field in _FIELDS]
        if (
            type(dtype) is str
            and dtype in _ITEM_BITS
            and _are_sizes(shape)
            and _are_sizes(offsets)
            and len(offsets) == 2
            and offsets[0] <= offsets[1]
        ):
            return offsets[0], offsets[1], tuple(shape), dtype
    raise _corrupt(file, f"has a damaged header: the entry of {name} is malformed", name)


def _are_sizes(numbers: Any) -> TypeGuard[list[int]]:
    if type(numbers) is not list or len(numbers) > _MAX_DIMENSIONS:
        return False
    # Not a generator, as there are thousands of these and adapters are read while others are computed.
    for number in numbers:  # noqa: SIM110
        if type(number) is not int or not 0 <= number < _MAX_SIZE:
            return False
    return True


def _corrupt(file: Path, what: str, tensor: str | None = None) -> CorruptArtifact:
    if tensor is None:
        return CorruptArtifact(f"{file.name} {what}", file=file.name)
    return CorruptArtifact(f"{file.name} {what}", file=file.name, tensor=tensor)
