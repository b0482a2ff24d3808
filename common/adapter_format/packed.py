"""The packed adapter: the one file that is stored, sent to workers and mapped by them, and its digests.

One safetensors file with one metadata key `loraplex` that says what it is. In format none a module is
`layers.{i}.{site}.A` [rank, in] and `.B` [out, rank] in their stored dtype. In a quantized format it is one or two
parts, each rank rows of one number format, A and B transposed alike:

    int8  .A.q8 I8 [r, in], .B.q8 I8 [r, out], .scale.q8 F32 [r]
    int4  .A.q4 U8 [r, in/2], .B.q4 U8 [r, out/2], .A_scale.q4 and .B_scale.q4 F16 or F32 [r, groups of 64]

What the numbers stand for is told in `parts`. The same adapter always packs to the same bytes; the artifact digest is
their SHA-256.
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

from common.adapter_format.parts import FORMAT_INT4, FORMAT_INT8, FORMAT_NONE, MULTIPLE, PackedPart, num_groups
from common.adapter_format.tensor_file import MAX_HEADER_BYTES, NUMPY_DTYPES, StoredTensor, open_tensors, write_tensors
from loraplex.digests import canonical_json, digest_of
from loraplex.errors import CorruptArtifact, InvalidAdapter
from loraplex.safetensors_header import read_header

__all__ = [
    "FORMAT_NONE",
    "PACKERS",
    "PackedAdapter",
    "PackedModule",
    "PackedPart",
    "module_tensors",
    "open_packed",
    "pack",
    "quantized_module",
    "version_digest",
]

PACKERS: Final[Mapping[str, int]] = {FORMAT_NONE: 1, FORMAT_INT8: 2, FORMAT_INT4: 1}
"""The packer of each format. Raise one where the same adapter must pack to other bytes: all versions are repacked.

What an older packer wrote is read as well, as workers get it until then. int8: 2 added corrections (see `corrections`).
"""

_KEY: Final = "loraplex"
_PART_FORMATS: Final = {FORMAT_INT8: (FORMAT_INT8,), FORMAT_INT4: (FORMAT_INT8, FORMAT_INT4)}


EMBEDDING: Final = "embed_tokens"
"""Name of the token embedding: x is one-hot, in is the vocabulary. Its A lies as [vocabulary, rank], for row gathers:
parts' `a` [rank, in] are transposed views of that."""
HEAD: Final = "lm_head"
"""Name of the output head."""


@dataclass(frozen=True, slots=True)
class PackedAffine:
    """What a module's output becomes, after its LoRA was added: y <- scale * y + shift, by output feature.

    DoRA is scale = m / ||W + sBA|| and shift = (1 - scale) * the base's bias; a LoRA bias is scale 1 and shift s * bias.
    Both [out] float32, in every format.
    """

    scale: NDArray[np.float32]
    shift: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix that stands in for the base's: `name` is EMBEDDING or HEAD; `weight` [vocabulary, hidden] in `dtype`."""

    name: str
    dtype: str
    weight: NDArray[Any]


@dataclass(frozen=True, slots=True)
class PackedModule:
    """One LoRA. As stored by PEFT, y += scale * B(Ax); quantized, the sum of its parts. `affine` comes after it.

    `a` [rank, in] and `b` [out, rank] are read-only views of the mapped file; BF16 comes as uint16 bits. A quantized
    module has its numbers in `quantized`; its `a` [0, in] and `b` [out, 0] are empty.
    """

    name: str
    rank: int
    scale: float
    dtype: str
    a: NDArray[Any]
    b: NDArray[Any]
    quantized: tuple[PackedPart, ...] = ()
    affine: PackedAffine | None = None

    @property
    def parts(self) -> tuple[PackedPart, ...]:
        """The module's rank rows by number format, int8 before int4; their ranks add up to the module's."""
        return self.quantized or (PackedPart("none", self.rank, self.scale, self.dtype, self.a, self.b),)

    @property
    def in_features(self) -> int:
        """Inputs of the linear."""
        return int(self.a.shape[1])

    @property
    def out_features(self) -> int:
        """Outputs of the linear."""
        return int(self.b.shape[0])


def quantized_module(name: str, parts: tuple[PackedPart, ...]) -> PackedModule:
    """Return the module that these parts make; its dtype is theirs, "I8" or "U8"."""
    inner, out = parts[0].in_features, parts[0].out_features
    dtype = parts[-1].dtype
    a, b = np.empty((0, inner), np.int8), np.empty((out, 0), np.int8)
    return PackedModule(name, sum(part.rank for part in parts), 1.0, dtype, a, b, parts)


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter ready to serve; modules are sorted by name. Digests are lower-case hex SHA-256."""

    version_digest: str
    base_digest: str
    format: str
    modules: tuple[PackedModule, ...]
    matrices: tuple[PackedMatrix, ...] = ()


def version_digest(base_digest: str, modules: Iterable[PackedModule]) -> str:
    """Identify an adapter by what it computes: scales, ranks, factors and base; never by the bytes of its files.

    Of the factors as they were registered: all formats of an adapter are one version.
    """
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
        "packer": PACKERS[adapter.format],
        "format": adapter.format,
        "version_digest": adapter.version_digest,
        "base_digest": adapter.base_digest,
        "modules": {module.name: _facts(module) for module in adapter.modules},
    }
    tensors = [tensor for module in adapter.modules for tensor in module_tensors(module)]
    with file.open("wb") as stream:
        write_tensors(stream, tensors, {_KEY: canonical_json(header).decode()})
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def module_tensors(module: PackedModule) -> list[tuple[str, str, NDArray[Any]]]:
    """Return what a module is stored as: (name, dtype, array)."""
    name = module.name
    if not module.quantized:
        return [(f"{name}.A", module.dtype, module.a), (f"{name}.B", module.dtype, module.b)]
    tensors: list[tuple[str, str, NDArray[Any]]] = []
    for part in module.quantized:
        if part.a_scale is None or part.b_scale is None:
            scale = np.asarray(part.scale, np.float32)
            tensors += [
                (f"{name}.A.q8", "I8", part.a),
                (f"{name}.B.q8", "I8", part.b),
                (f"{name}.scale.q8", "F32", scale),
            ]
            continue
        tensors += [(f"{name}.A.q4", "U8", part.a), (f"{name}.B.q4", "U8", part.b)]
        for factor, scales in (("A", part.a_scale), ("B", part.b_scale)):
            tensors.append((f"{name}.{factor}_scale.q4", "F16" if scales.dtype == np.float16 else "F32", scales))
    return tensors


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
        form = header["format"]
        if form not in PACKERS or not 1 <= header["packer"] <= PACKERS[form]:
            known = ", ".join(f"{packer}/{known}" for known, packer in PACKERS.items())
            raise CorruptArtifact(
                f"{path.name} was packed as {header['packer']}/{form}; this program reads {known}", file=path.name
            )
        tensors = dict(stored.tensors)
        read = _plain_module if form == FORMAT_NONE else _quantized_module
        modules = tuple(read(path, name, form, header["modules"][name], tensors) for name in sorted(header["modules"]))
        if tensors:
            name = next(iter(tensors))
            raise CorruptArtifact(f"{path.name}: the tensor {name} belongs to no module", file=path.name, tensor=name)
        if not modules:
            raise CorruptArtifact(f"{path.name} has no modules", file=path.name)
        return PackedAdapter(str(header["version_digest"]), str(header["base_digest"]), form, modules)
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


_Tensors = dict[str, StoredTensor]  # readers take theirs out, so that what remains belongs to nobody


def _facts(module: PackedModule) -> dict[str, Any]:
    return {"rank": module.rank} if module.quantized else {"rank": module.rank, "scale": module.scale}


def _plain_module(path: Path, name: str, _: str, facts: Mapping[str, Any], tensors: _Tensors) -> PackedModule:
    a, b = _take(path, f"{name}.A", tensors), _take(path, f"{name}.B", tensors)
    rank, scale = int(facts["rank"]), float(facts["scale"])
    shaped = len(a.shape) == len(b.shape) == 2 and a.shape[0] == b.shape[1] == rank >= 1
    if not shaped or a.dtype != b.dtype or a.dtype not in NUMPY_DTYPES or not np.isfinite(scale):
        raise CorruptArtifact(f"{path.name}: module {name} contradicts itself", file=path.name, tensor=name)
    return PackedModule(name, rank, scale, a.dtype, a.array(), b.array())


def _quantized_module(path: Path, name: str, form: str, facts: Mapping[str, Any], tensors: _Tensors) -> PackedModule:
    parts = []
    if FORMAT_INT8 in _PART_FORMATS[form] and f"{name}.A.q8" in tensors:
        parts.append(_int8_part(path, name, tensors))
    if FORMAT_INT4 in _PART_FORMATS[form] and f"{name}.A.q4" in tensors:
        parts.append(_int4_part(path, name, tensors))
    widths = {(part.in_features, part.out_features) for part in parts}
    rank = int(facts["rank"])
    if len(widths) != 1 or sum(part.rank for part in parts) != rank:
        raise CorruptArtifact(
            f"{path.name}: the parts of module {name} do not make {rank} rank rows of one shape",
            file=path.name,
            tensor=name,
        )
    return quantized_module(name, tuple(parts))


def _int8_part(path: Path, name: str, tensors: _Tensors) -> PackedPart:
    a = _take(path, f"{name}.A.q8", tensors, "I8", (None, None))
    rank = a.shape[0]
    b = _take(path, f"{name}.B.q8", tensors, "I8", (rank, None))
    scale = _take(path, f"{name}.scale.q8", tensors, "F32", (rank,))
    _check_width(path, a, a.shape[1])
    _check_width(path, b, b.shape[1])
    return PackedPart("int8", rank, _scales(path, scale), "I8", a.array(), b.array())


def _int4_part(path: Path, name: str, tensors: _Tensors) -> PackedPart:
    a = _take(path, f"{name}.A.q4", tensors, "U8", (None, None))
    rank = a.shape[0]
    b = _take(path, f"{name}.B.q4", tensors, "U8", (rank, None))
    scales = []
    for factor, values in (("A", a), ("B", b)):
        width = 2 * values.shape[1]
        _check_width(path, values, width)
        shape = (rank, num_groups(width))
        scales.append(_scales(path, _take(path, f"{name}.{factor}_scale.q4", tensors, "F16/F32", shape)))
    return PackedPart("int4", rank, 1.0, "U8", a.array(), b.array(), *scales)


def _take(
    path: Path, name: str, tensors: _Tensors, dtype: str = "", shape: tuple[int | None, ...] = ()
) -> StoredTensor:
    """Take a tensor out, having checked its dtype (one of those joined by "/") and shape (None is any size)."""
    tensor = tensors.pop(name, None)
    if tensor is None:
        raise CorruptArtifact(f"{path.name}: the tensor {name} is missing", file=path.name, tensor=name)
    fits = len(tensor.shape) == len(shape) and all(
        size >= 1 and size == (wanted or size) for size, wanted in zip(tensor.shape, shape, strict=True)
    )
    if dtype and not (fits and tensor.dtype in dtype.split("/")):
        wanted_shape = [size or "any" for size in shape]
        raise CorruptArtifact(
            f"{path.name}: {name} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {wanted_shape}",
            file=path.name,
            tensor=name,
        )
    return tensor


def _check_width(path: Path, tensor: StoredTensor, width: int) -> None:
    if width % MULTIPLE:
        raise CorruptArtifact(
            f"{path.name}: the rows of {tensor.name} have {width} values, not a multiple of {MULTIPLE}",
            file=path.name,
            tensor=tensor.name,
        )


def _scales(path: Path, tensor: StoredTensor) -> NDArray[Any]:
    scales = tensor.array()
    if not (np.isfinite(scales) & (scales >= 0)).all():
        raise CorruptArtifact(
            f"{path.name}: {tensor.name} has scales that are negative or not finite", file=path.name, tensor=tensor.name
        )
    return scales


def _sha256(array: NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data.cast("B")).hexdigest()
