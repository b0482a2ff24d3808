"""Adapters' parts of the vocabulary's size, in memory of their own: LoRA on the embedding and the head, and matrices.

Owns their budget of bytes, and how they come from a packed file to what `worker.model.vocabulary` computes with.
Factors are kept in float32 with all scales folded in: they are small beside the base's own matrices. Matrices stay as
they are stored where the device multiplies by that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.adapter_format.packed import EMBEDDING, HEAD, PackedAdapter, PackedAffine, PackedMatrix, PackedModule
from common.adapter_format.parts import dequantize
from loraplex.errors import CorruptArtifact, DeviceFull, TooLarge
from worker.adapters.outside import matrix_bytes, module_bytes
from worker.kernels.linear import Linear
from worker.kernels.vocabulary import EmbeddingChange, HeadChange, OutputAffine, VocabularyChange

OPTION: Final = "max_vocabulary_bytes"
DEFAULT_BYTES: Final = 2**30
_RETRY_AFTER_S: Final = 1.0
_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class VocabularyShape:
    """What such a part must fit: the base's vocabulary and hidden features."""

    tokens: int
    hidden: int

    def of(self, name: str) -> tuple[int, int]:
        """Return (in, out) of the embedding, whose input is a token, or of the head."""
        return (self.tokens, self.hidden) if name == EMBEDDING else (self.hidden, self.tokens)


class VocabularyMemory:
    """The parts that are on the device. `load` may run on any thread, several at a time."""

    def __init__(
        self,
        shape: VocabularyShape,
        pack: Callable[[Linear], Linear],
        *,
        device: torch.device,
        dtype: torch.dtype,
        limit_bytes: int = DEFAULT_BYTES,
    ) -> None:
        """`pack` is the backend's; `dtype` is that of activations where the device is no CPU."""
        self._shape, self._pack, self._device, self._dtype = shape, pack, device, dtype
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of all adapters' parts."""
        return self._used_bytes

    def load(self, packed: PackedAdapter, file_name: str) -> VocabularyChange | None:
        """Copy an adapter's parts of the vocabulary's size to the device; None where it has none.

        Raises CorruptArtifact for one that does not fit the base; TooLarge or, where others take up the room,
        DeviceFull, naming the option.
        """
        modules = {module.name: module for module in packed.modules if module.name in (EMBEDDING, HEAD)}
        matrices = {matrix.name: matrix for matrix in packed.matrices}
        if not modules and not matrices:
            return None
        for module in modules.values():
            self._check_module(module, file_name)
        for matrix in matrices.values():
            self._check_matrix(matrix, file_name)
        num_bytes = sum(map(_module_bytes, modules.values()))
        num_bytes += sum(matrix_bytes(matrix.name, matrix.dtype, matrix.weight.size) for matrix in matrices.values())
        self._reserve(num_bytes)
        try:
            embedding = self._embedding(matrices.get(EMBEDDING), modules.get(EMBEDDING))
            head = self._head(matrices.get(HEAD), modules.get(HEAD))
            return VocabularyChange(embedding, head, num_bytes)
        except BaseException:
            self._give_back(num_bytes)
            raise

    def release(self, change: VocabularyChange) -> None:
        """Count parts no longer; their memory is free once the last step that uses them is done."""
        self._give_back(change.num_bytes)

    def _reserve(self, num_bytes: int) -> None:
        with self._lock:
            free_bytes = self._limit_bytes - self._used_bytes
            if num_bytes <= free_bytes:
                self._used_bytes += num_bytes
                return
        needs = f"the adapter's embedding and head take {num_bytes} bytes beside the arena"
        if num_bytes > self._limit_bytes:
            raise TooLarge(
                f"{needs}, this worker keeps at most {self._limit_bytes} of such; raise {OPTION}",
                field=OPTION,
                limit=self._limit_bytes,
                length=num_bytes,
            )
        raise DeviceFull(
            f"{needs}, and adapters on the device leave {free_bytes} of {self._limit_bytes}; try again, or raise "
            f"{OPTION}",
            retry_after_s=_RETRY_AFTER_S,
            field=OPTION,
            limit=self._limit_bytes,
            length=num_bytes,
        )

    def _give_back(self, num_bytes: int) -> None:
        with self._lock:
            self._used_bytes -= num_bytes

    def _check_module(self, module: PackedModule, file_name: str) -> None:
        expected = self._shape.of(module.name)
        sizes = {(part.in_features, part.out_features) for part in module.parts}
        if sizes != {expected}:
            raise CorruptArtifact(
                f"{file_name}: {module.name} maps {sorted(sizes)} (inputs, outputs); on this base it is {expected}",
                file=file_name,
                tensor=module.name,
            )

    def _check_matrix(self, matrix: PackedMatrix, file_name: str) -> None:
        expected = (self._shape.tokens, self._shape.hidden)
        known = matrix.name in (EMBEDDING, HEAD) and matrix.dtype in _DTYPES
        if not known or matrix.weight.shape != expected:
            raise CorruptArtifact(
                f"{file_name}: the matrix {matrix.name} is {matrix.dtype} {list(matrix.weight.shape)}; on this base it "
                f"is {list(expected)}",
                file=file_name,
                tensor=matrix.name,
            )

    def _matrix_dtype(self, matrix: PackedMatrix) -> torch.dtype:
        """Return what a matrix is kept in: on a CPU as it is stored, but that heads in float16 are widened."""
        if self._device.type != "cpu":
            return self._dtype
        return torch.float32 if matrix.name == HEAD and matrix.dtype == "F16" else _DTYPES[matrix.dtype]

    def _matrix(self, matrix: PackedMatrix) -> Tensor:
        stored = torch.from_numpy(np.array(matrix.weight))  # a copy: the file is mapped
        floats = stored.view(_DTYPES[matrix.dtype])
        return floats.to(device=self._device, dtype=self._matrix_dtype(matrix))

    def _embedding(self, matrix: PackedMatrix | None, module: PackedModule | None) -> EmbeddingChange | None:
        if matrix is None and module is None:
            return None
        down, up = (None, None)
        if module is not None:
            a, b = _factors(module)
            down, up = self._floats(np.ascontiguousarray(a.T)), self._linear(b)
        return EmbeddingChange(None if matrix is None else self._matrix(matrix), down, up, self._affine(module))

    def _head(self, matrix: PackedMatrix | None, module: PackedModule | None) -> HeadChange | None:
        if matrix is None and module is None:
            return None
        down, up = (None, None)
        if module is not None:
            down, up = map(self._linear, _factors(module))
        own = None if matrix is None else self._pack(Linear.plain(self._matrix(matrix), None))
        return HeadChange(own, down, up, self._affine(module))

    def _linear(self, weight: NDArray[np.float32]) -> Linear:
        return self._pack(Linear.plain(self._floats(np.ascontiguousarray(weight)), None))

    def _floats(self, values: NDArray[Any]) -> Tensor:
        dtype = torch.float32 if self._device.type == "cpu" else self._dtype
        return torch.from_numpy(values).to(device=self._device, dtype=dtype)

    def _affine(self, module: PackedModule | None) -> OutputAffine | None:
        affine: PackedAffine | None = None if module is None else module.affine
        if affine is None:
            return None
        scale, shift = (torch.from_numpy(np.array(values)).to(self._device) for values in (affine.scale, affine.shift))
        return OutputAffine(scale, shift)


def _module_bytes(module: PackedModule) -> int:
    first = module.parts[0]
    return module_bytes(module.rank, first.in_features, first.out_features, affine=module.affine is not None)


def _factors(module: PackedModule) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return A [rank, in] and B [out, rank] of all parts, in float32 with every scale in one of them."""
    factors: Sequence[tuple[NDArray[np.float32], NDArray[np.float32]]] = [dequantize(part) for part in module.parts]
    if len(factors) == 1:
        return factors[0]
    return np.concatenate([a for a, _ in factors]), np.concatenate([b for _, b in factors], axis=1)
