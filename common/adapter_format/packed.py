"""The packed adapter: the one file that is stored, sent to workers and mapped by them, and its digests.

One safetensors file with one metadata key `loraplex` that says what it is. In format none a module is
`layers.{i}.{site}.A` [rank, in] and `.B` [out, rank] in their stored dtype. In a quantized format it is one or two
parts, each rank rows of one number format, A and B transposed alike:

    int8  .A.q8 I8 [r, in], .B.q8 I8 [r, out], .scale.q8 F32 [r]
    int4  .A.q4 U8 [r, in/2], .B.q4 U8 [r, out/2], .A_scale.q4 and .B_scale.q4 F16 or F32 [r, groups of 64]

What the numbers stand for is told in `parts`. The token embedding is the module `embed_tokens`, whose A lies as
[vocabulary, r] and which is int8 in int4 files; the output head is `lm_head`. In every format a module may have
`.affine_scale` and `.affine_shift` F32 [out] (in format none DoRA's `.magnitude` besides), and embedding and head may
be replaced by `embed_tokens.weight` and `lm_head.weight` [vocabulary, hidden] in their stored dtype.

The same adapter always packs to the same bytes; the artifact digest is their SHA-256.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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
from common.adapter_format.parts import FORMAT_NONE, PackedPart
from common.adapter_format.reading import KEY, open_packed
from common.adapter_format.tensor_file import write_tensors
from loraplex.digests import canonical_json, digest_of

__all__ = [
    "EMBEDDING",
    "FORMAT_NONE",
    "HEAD",
    "PACKERS",
    "PackedAdapter",
    "PackedAffine",
    "PackedMatrix",
    "PackedModule",
    "PackedPart",
    "matrix_tensors",
    "module_tensors",
    "open_packed",
    "pack",
    "quantized_module",
    "version_digest",
]

_Tensor = tuple[str, str, NDArray[Any]]


def version_digest(base_digest: str, modules: Iterable[PackedModule], matrices: Iterable[PackedMatrix] = ()) -> str:
    """Identify an adapter by what it computes: scales, ranks, factors and base; never by the bytes of its files.

    Of the factors as they were registered: all formats of an adapter are one version. Of DoRA the magnitudes count, not
    what follows from them and the base.
    """
    ordered = sorted(modules, key=lambda module: module.name)
    facts = {
        "base": base_digest,
        "config": {
            "peft_type": "LORA",
            "modules": {module.name: {"rank": module.rank, "scale": module.scale} for module in ordered},
        },
        "tensors": [
            [name, dtype, list(array.shape), _sha256(array)]
            for tensors in (
                *(_identity(module) for module in ordered),
                *([(f"{m.name}.weight", m.dtype, m.weight)] for m in sorted(matrices, key=lambda m: m.name)),
            )
            for name, dtype, array in tensors
        ],
    }
    return digest_of(facts)


def _identity(module: PackedModule) -> list[_Tensor]:
    """Return what of an exact module makes it what it is, in one orientation."""
    name = module.name
    tensors: list[_Tensor] = [(f"{name}.A", module.dtype, module.a), (f"{name}.B", module.dtype, module.b)]
    if module.affine is not None:
        magnitude = module.affine.magnitude
        if magnitude is not None:
            tensors.append((f"{name}.magnitude", "F32", magnitude))
        else:
            tensors += [
                (f"{name}.affine_scale", "F32", module.affine.scale),
                (f"{name}.affine_shift", "F32", module.affine.shift),
            ]
    return tensors


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
    if adapter.matrices:
        header["matrices"] = [matrix.name for matrix in adapter.matrices]
        tensors += matrix_tensors(adapter.matrices)
    with file.open("wb") as stream:
        write_tensors(stream, tensors, {KEY: canonical_json(header).decode()})
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def module_tensors(module: PackedModule) -> list[_Tensor]:
    """Return what a module is stored as: (name, dtype, array)."""
    name = module.name
    tensors: list[_Tensor] = []
    if not module.quantized:
        tensors += [(f"{name}.A", module.dtype, _as_stored(name, module.a)), (f"{name}.B", module.dtype, module.b)]
    for part in module.quantized:
        if part.a_scale is None or part.b_scale is None:
            scale = np.asarray(part.scale, np.float32)
            tensors += [
                (f"{name}.A.q8", "I8", _as_stored(name, part.a)),
                (f"{name}.B.q8", "I8", part.b),
                (f"{name}.scale.q8", "F32", scale),
            ]
            continue
        tensors += [(f"{name}.A.q4", "U8", part.a), (f"{name}.B.q4", "U8", part.b)]
        for factor, scales in (("A", part.a_scale), ("B", part.b_scale)):
            tensors.append((f"{name}.{factor}_scale.q4", "F16" if scales.dtype == np.float16 else "F32", scales))
    if module.affine is not None:
        tensors += [
            (f"{name}.affine_scale", "F32", module.affine.scale),
            (f"{name}.affine_shift", "F32", module.affine.shift),
        ]
        if module.affine.magnitude is not None:
            tensors.append((f"{name}.magnitude", "F32", module.affine.magnitude))
    return tensors


def matrix_tensors(matrices: Iterable[PackedMatrix]) -> list[_Tensor]:
    """Return what full matrices are stored as: (name, dtype, array)."""
    return [(f"{matrix.name}.weight", matrix.dtype, matrix.weight) for matrix in matrices]


def _as_stored(module: str, a: NDArray[Any]) -> NDArray[Any]:
    return a.T if module == EMBEDDING else a


def _facts(module: PackedModule) -> dict[str, Any]:
    facts: dict[str, Any] = {"rank": module.rank} if module.quantized else {"rank": module.rank, "scale": module.scale}
    if module.affine is not None:
        facts["affine"] = "scale" if module.affine.magnitude is None else "magnitude"
    return facts


def _sha256(array: NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data.cast("B")).hexdigest()
