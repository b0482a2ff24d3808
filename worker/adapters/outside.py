"""What of an adapter does not go into the arena, by its file's header alone: parts of the vocabulary's size.

The front end tells the engine, which keeps chunks and bytes for an adapter before its file is opened. The rules of what
such parts take on the device are here for both. Knows no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from common.adapter_format.modules import EMBEDDING, HEAD
from common.adapter_format.tensor_file import MAX_HEADER_BYTES
from loraplex.safetensors_header import LENGTH_BYTES

_FLOAT_BYTES: Final = 4
_STORED_BYTES: Final = {"F32": 4, "F16": 2, "BF16": 2}


class Outside(NamedTuple):
    """Bytes of an adapter outside the arena."""

    file_bytes: int = 0
    """Of its file."""
    device_bytes: int = 0
    """What they take on the device."""


NOTHING: Final = Outside()


def module_bytes(rank: int, inner: int, out: int, *, affine: bool) -> int:
    """Return what a LoRA on embedding or head takes: both factors in float32, and two numbers an output."""
    return _FLOAT_BYTES * (rank * (inner + out) + (2 * out if affine else 0))


def matrix_bytes(name: str, dtype: str, num_values: int) -> int:
    """Return what a matrix takes: as it is stored, but heads in float16 are widened, as no CPU multiplies by it."""
    return num_values * (_FLOAT_BYTES if name == HEAD and dtype == "F16" else _STORED_BYTES[dtype])


def outside_of(file: Path) -> Outside:
    """Return what lies outside of a packed file's adapter; nothing for a file that a reader will refuse."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
            raw = stream.read(length) if length <= MAX_HEADER_BYTES else b""
        if f'"{EMBEDDING}.'.encode() not in raw and f'"{HEAD}.'.encode() not in raw:
            return NOTHING
        header = json.loads(raw)
        parts = [_outside(name, header) for name in (EMBEDDING, HEAD)]
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return NOTHING
    return Outside(sum(part.file_bytes for part in parts), sum(part.device_bytes for part in parts))


def _outside(name: str, header: Mapping[str, Any]) -> Outside:
    """Return the part of one module. Raises where the header is not as a packed file's is."""
    tensors = {key.removeprefix(f"{name}."): entry for key, entry in header.items() if key.startswith(f"{name}.")}
    file_bytes = sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in tensors.values())
    device_bytes = 0
    if (matrix := tensors.get("weight")) is not None:
        device_bytes += matrix_bytes(name, matrix["dtype"], matrix["shape"][0] * matrix["shape"][1])
    rank = inner = out = 0
    for suffix, packed in (("", 1), (".q8", 1), (".q4", 2)):
        if (a := tensors.get(f"A{suffix}")) is not None:
            b_shape = tensors[f"B{suffix}"]["shape"]
            here, width = a["shape"][::-1] if name == EMBEDDING else a["shape"]
            rank, inner = rank + here, width * packed
            out = b_shape[1] * packed if suffix else b_shape[0]
    if rank:
        device_bytes += module_bytes(rank, inner, out, affine="affine_scale" in tensors)
    return Outside(file_bytes, device_bytes)
