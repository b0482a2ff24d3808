"""What a packed adapter is made of: modules with their parts and affines, and matrices that stand in for the base's.

Values only; how they lie in a file is told in `packed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from common.adapter_format.parts import FORMAT_INT4, FORMAT_INT8, FORMAT_NONE, PackedPart

PACKERS: Final[Mapping[str, int]] = {FORMAT_NONE: 1, FORMAT_INT8: 2, FORMAT_INT4: 1}
"""The packer of each format. Raise one where the same adapter must pack to other bytes: all versions are repacked.

What an older packer wrote is read as well, as workers get it until then. int8: 2 added corrections (see `corrections`).
"""

EMBEDDING: Final = "embed_tokens"
"""Name of the token embedding: x is one-hot, in is the vocabulary. Its A lies as [vocabulary, rank], for row gathers:
parts' `a` [rank, in] are transposed views of that."""
HEAD: Final = "lm_head"
"""Name of the output head."""


@dataclass(frozen=True, slots=True)
class PackedAffine:
    """What a module's output becomes, after its LoRA was added: y <- scale * y + shift, by output feature.

    DoRA is scale = m / ||W + sBA|| and shift = (1 - scale) * the base's bias; a LoRA bias is scale 1, shift s * bias.
    Both [out] float32, in every format. `magnitude` is DoRA's m, where the exact factors are: what `scale` was made of.
    """

    scale: NDArray[np.float32]
    shift: NDArray[np.float32]
    magnitude: NDArray[np.float32] | None = None

    def served(self) -> PackedAffine:
        """Return it without what is only kept to pack the adapter again."""
        return PackedAffine(self.scale, self.shift)


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


def quantized_module(name: str, parts: tuple[PackedPart, ...], affine: PackedAffine | None = None) -> PackedModule:
    """Return the module that these parts make; its dtype is theirs, "I8" or "U8"."""
    inner, out = parts[0].in_features, parts[0].out_features
    dtype = parts[-1].dtype
    a, b = np.empty((0, inner), np.int8), np.empty((out, 0), np.int8)
    return PackedModule(name, sum(part.rank for part in parts), 1.0, dtype, a, b, parts, affine)


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter ready to serve; modules and matrices are sorted by name. Digests are lower-case hex SHA-256."""

    version_digest: str
    base_digest: str
    format: str
    modules: tuple[PackedModule, ...]
    matrices: tuple[PackedMatrix, ...] = ()
