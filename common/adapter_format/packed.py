"""The packed adapter: the one file that is stored, sent to workers and mapped by them, and its digests.

One safetensors file with `layers.{i}.{site}.A` [rank, in] and `.B` [out, rank] in their stored dtype, and one metadata
key `loraplex` that says what it is. The same adapter always packs to the same bytes; the artifact digest is their
SHA-256.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from common.adapter_format.tensor_file import MAX_HEADER_BYTES, NUMPY_DTYPES, StoredTensor, open_tensors, write_tensors
from loraplex.digests import canonical_json, digest_of
from loraplex.errors import CorruptArtifact, InvalidAdapter
from loraplex.safetensors_header import read_header

PACKER: Final = 1
FORMAT_NONE: Final = "none"
_KEY: Final = "loraplex"


@dataclass(frozen=True, slots=True)
class PackedModule:
    """One LoRA: y += scale * B(Ax).

    `a` [rank, in] and `b` [out, rank] are read-only views of the mapped file; BF16 comes as uint16 bits.
    """

    name: str
    rank: int
    scale: float
    dtype: str
    a: NDArray[Any]
    b: NDArray[Any]


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter ready to serve; modules are sorted by name. Digests are lower-case hex SHA-256."""

    version_digest: str
    base_digest: str
    format: str
    modules: tuple[PackedModule, ...]


def version_digest(base_digest: str, modules: Iterable[PackedModule]) -> str:
    """Identify an adapter by what it computes: scales, ranks, factors and base; never by the bytes of its files."""
    ordered = sorted(modules, key=lambda module: module.name)
    facts = {
        "base": base_digest,
        "config": {
            "peft_type": "LORA",
            "modules": {module.name: {"rank": module.rank, "scale": module.scale} for module in ordered},
        },
        "tensors": [
            [f"{module.name}.{factor}", module.dtype, list(array.shape), _sha256(array)]
            for module in ordered
            for factor, array in (("A", module.a), ("B", module.b))
        ],
    }
    return digest_of(facts)


def pack(adapter: PackedAdapter, file: Path) -> str:
    """Write the adapter's packed file and return the artifact digest. Raises OSError where the disk does."""
    header = {
        "packer": PACKER,
        "format": adapter.format,
        "version_digest": adapter.version_digest,
        "base_digest": adapter.base_digest,
        "modules": {module.name: {"rank": module.rank, "scale": module.scale} for module in adapter.modules},
    }
    tensors = [
        (f"{module.name}.{factor}", module.dtype, array)
        for module in adapter.modules
        for factor, array in (("A", module.a), ("B", module.b))
    ]
    with file.open("wb") as stream:
        write_tensors(stream, tensors, {_KEY: canonical_json(header).decode()})
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def open_packed(path: Path) -> PackedAdapter:
    """Map a packed file. Raises CorruptArtifact where it is not whole or not one; does not check its digest."""
    try:
        stored = open_tensors(path)
    except CorruptArtifact:
        raise
    except InvalidAdapter as error:  # a pickle in the place of a packed file is damage here
        raise CorruptArtifact(error.message, file=path.name) from error
    try:
        header = json.loads(stored.metadata[_KEY])
        if (header["packer"], header["format"]) != (PACKER, FORMAT_NONE):
            raise CorruptArtifact(
                f"{path.name} was packed as {header['packer']}/{header['format']}; this program reads "
                f"{PACKER}/{FORMAT_NONE}",
                file=path.name,
            )
        names = sorted(header["modules"])
        if stored.tensors.keys() != {f"{name}.{factor}" for name in names for factor in "AB"}:
            raise CorruptArtifact(f"{path.name}: its tensors are not those of its modules", file=path.name)
        modules = tuple(_module(path, name, header["modules"][name], stored.tensors) for name in names)
        return PackedAdapter(str(header["version_digest"]), str(header["base_digest"]), header["format"], modules)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptArtifact(
            f"{path.name} is not a packed adapter: its metadata is damaged", file=path.name
        ) from error


def read_version_digest(path: Path) -> str:
    """Return the version a packed file says it holds, from its header alone. Raises CorruptArtifact."""
    try:
        header = json.loads(read_header(path, max_header_bytes=MAX_HEADER_BYTES).metadata[_KEY])
        return str(header["version_digest"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptArtifact(
            f"{path.name} is not a packed adapter: its metadata is damaged", file=path.name
        ) from error


def _module(path: Path, name: str, facts: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> PackedModule:
    a, b = tensors[f"{name}.A"], tensors[f"{name}.B"]
    rank, scale = int(facts["rank"]), float(facts["scale"])
    shaped = len(a.shape) == len(b.shape) == 2 and a.shape[0] == b.shape[1] == rank >= 1
    if not shaped or a.dtype != b.dtype or a.dtype not in NUMPY_DTYPES or not np.isfinite(scale):
        raise CorruptArtifact(f"{path.name}: module {name} contradicts itself", file=path.name, tensor=name)
    return PackedModule(name, rank, scale, a.dtype, a.array(), b.array())


def _sha256(array: NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data.cast("B")).hexdigest()
