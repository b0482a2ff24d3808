"""Reading a packed file, checked against what its own header says: a file that is not whole yields no adapter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from common.adapter_format.modules import (
    EMBEDDING,
    HEAD,
    PACKERS,
    PackedAdapter,
    PackedAffine,
    PackedMatrix,
    PackedModule,
    quantized_module,
)
from common.adapter_format.parts import FORMAT_INT4, FORMAT_INT8, FORMAT_NONE, MULTIPLE, PackedPart, num_groups
from common.adapter_format.tensor_file import NUMPY_DTYPES, StoredTensor, open_tensors
from loraplex.errors import CorruptArtifact, InvalidAdapter

KEY: Final = "loraplex"
"""Key of the file's metadata."""

_AFFINE: Final = "scale"
_DORA: Final = "magnitude"
_MATRIX_DTYPES: Final = "/".join(NUMPY_DTYPES)


def open_packed(path: Path) -> PackedAdapter:
    """Map a packed file. Raises CorruptArtifact where it is not whole or not one; does not check its digest."""
    try:
        stored = open_tensors(path)
    except CorruptArtifact:
        raise
    except InvalidAdapter as error:  # a pickle in the place of a packed file is damage here
        raise CorruptArtifact(error.message, file=path.name) from error
    try:
        header = json.loads(stored.metadata[KEY])
        form = header["format"]
        if form not in PACKERS or not 1 <= header["packer"] <= PACKERS[form]:
            known = ", ".join(f"{packer}/{known}" for known, packer in PACKERS.items())
            raise CorruptArtifact(
                f"{path.name} was packed as {header['packer']}/{form}; this program reads {known}", file=path.name
            )
        tensors = _Tensors(path, stored.tensors)
        read = _plain_module if form == FORMAT_NONE else _quantized_module
        modules = tuple(read(tensors, name, form, header["modules"][name]) for name in sorted(header["modules"]))
        matrices = tuple(_matrix(tensors, name) for name in sorted(header.get("matrices", ())))
        tensors.check_all_taken()
        if not modules and not matrices:
            raise CorruptArtifact(f"{path.name} has no modules", file=path.name)
        if both := {module.name for module in modules} & {matrix.name for matrix in matrices}:
            raise CorruptArtifact(f"{path.name} both changes and replaces {', '.join(both)}", file=path.name)
        return PackedAdapter(str(header["version_digest"]), str(header["base_digest"]), form, modules, matrices)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptArtifact(
            f"{path.name} is not a packed adapter: its metadata is damaged", file=path.name
        ) from error


class _Tensors:
    """The tensors of a file that nothing has taken yet; what remains belongs to nobody."""

    def __init__(self, path: Path, tensors: Mapping[str, StoredTensor]) -> None:
        self._path = path
        self._left = dict(tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, dtype: str = "", shape: tuple[int | None, ...] = ()) -> StoredTensor:
        """Take a tensor out, having checked its dtype (one of those joined by "/") and shape (None is any size)."""
        tensor = self._left.pop(name, None)
        if tensor is None:
            raise self.corrupt(f"the tensor {name} is missing", name)
        fits = len(tensor.shape) == len(shape) and all(
            size >= 1 and size == (wanted or size) for size, wanted in zip(tensor.shape, shape, strict=True)
        )
        if dtype and not (fits and tensor.dtype in dtype.split("/")):
            wanted_shape = [size or "any" for size in shape]
            raise self.corrupt(f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {wanted_shape}", name)
        return tensor

    def check_width(self, tensor: StoredTensor, width: int) -> None:
        if width % MULTIPLE:
            raise self.corrupt(
                f"the rows of {tensor.name} have {width} values, not a multiple of {MULTIPLE}", tensor.name
            )

    def check_all_taken(self) -> None:
        if self._left:
            name = next(iter(self._left))
            raise self.corrupt(f"the tensor {name} belongs to no module", name)

    def corrupt(self, what: str, name: str) -> CorruptArtifact:
        return CorruptArtifact(f"{self._path.name}: {what}", file=self._path.name, tensor=name)


def _plain_module(tensors: _Tensors, name: str, _: str, facts: Mapping[str, Any]) -> PackedModule:
    stored_a, b = tensors.take(f"{name}.A"), tensors.take(f"{name}.B")
    rank, scale = int(facts["rank"]), float(facts["scale"])
    a_shape = stored_a.shape[::-1] if name == EMBEDDING else stored_a.shape
    shaped = len(a_shape) == len(b.shape) == 2 and a_shape[0] == b.shape[1] == rank >= 1
    if not shaped or stored_a.dtype != b.dtype or b.dtype not in NUMPY_DTYPES or not np.isfinite(scale):
        raise tensors.corrupt(f"module {name} contradicts itself", name)
    a = stored_a.array().T if name == EMBEDDING else stored_a.array()
    return PackedModule(
        name, rank, scale, b.dtype, a, b.array(), affine=_affine(tensors, name, b.shape[0], facts, (_AFFINE, _DORA))
    )


def _quantized_module(tensors: _Tensors, name: str, form: str, facts: Mapping[str, Any]) -> PackedModule:
    parts = []
    if f"{name}.A.q8" in tensors:
        parts.append(_int8_part(tensors, name))
    if form == FORMAT_INT4 and name != EMBEDDING and f"{name}.A.q4" in tensors:
        parts.append(_int4_part(tensors, name))
    widths = {(part.in_features, part.out_features) for part in parts}
    rank = int(facts["rank"])
    if len(widths) != 1 or sum(part.rank for part in parts) != rank:
        raise tensors.corrupt(f"the parts of module {name} do not make {rank} rank rows of one shape", name)
    affine = _affine(tensors, name, parts[0].out_features, facts, (_AFFINE,))
    return quantized_module(name, tuple(parts), affine)


def _int8_part(tensors: _Tensors, name: str) -> PackedPart:
    stored_a = tensors.take(f"{name}.A.q8", "I8", (None, None))
    rank = stored_a.shape[1 if name == EMBEDDING else 0]
    b = tensors.take(f"{name}.B.q8", "I8", (rank, None))
    scale = tensors.take(f"{name}.scale.q8", "F32", (rank,))
    a = stored_a.array().T if name == EMBEDDING else stored_a.array()
    if name != EMBEDDING:
        tensors.check_width(stored_a, stored_a.shape[1])
    tensors.check_width(b, b.shape[1])
    return PackedPart(FORMAT_INT8, rank, _scales(tensors, scale), "I8", a, b.array())


def _int4_part(tensors: _Tensors, name: str) -> PackedPart:
    a = tensors.take(f"{name}.A.q4", "U8", (None, None))
    rank = a.shape[0]
    b = tensors.take(f"{name}.B.q4", "U8", (rank, None))
    scales = []
    for factor, values in (("A", a), ("B", b)):
        width = 2 * values.shape[1]
        tensors.check_width(values, width)
        shape = (rank, num_groups(width))
        scales.append(_scales(tensors, tensors.take(f"{name}.{factor}_scale.q4", "F16/F32", shape)))
    return PackedPart(FORMAT_INT4, rank, 1.0, "U8", a.array(), b.array(), *scales)


def _affine(
    tensors: _Tensors, name: str, out: int, facts: Mapping[str, Any], known: tuple[str, ...]
) -> PackedAffine | None:
    kind = facts.get("affine")
    if kind is None:
        return None
    if kind not in known:
        raise tensors.corrupt(f"the affine of module {name} is {kind!r:.40}, not one of {', '.join(known)}", name)
    suffixes = ("affine_scale", "affine_shift", *(("magnitude",) if kind == _DORA else ()))
    values = []
    for suffix in suffixes:
        tensor = tensors.take(f"{name}.{suffix}", "F32", (out,))
        if not np.isfinite(tensor.array()).all():
            raise tensors.corrupt(f"{tensor.name} has values that are not finite", tensor.name)
        values.append(tensor.array())
    return PackedAffine(*values)


def _matrix(tensors: _Tensors, name: str) -> PackedMatrix:
    if name not in (EMBEDDING, HEAD):
        raise tensors.corrupt(f"{name!r:.40} is no matrix that can be replaced", str(name))
    tensor = tensors.take(f"{name}.weight", _MATRIX_DTYPES, (None, None))
    return PackedMatrix(name, tensor.dtype, tensor.array())


def _scales(tensors: _Tensors, tensor: StoredTensor) -> NDArray[Any]:
    scales = tensor.array()
    if not (np.isfinite(scales) & (scales >= 0)).all():
        raise tensors.corrupt(f"{tensor.name} has scales that are negative or not finite", tensor.name)
    return scales
