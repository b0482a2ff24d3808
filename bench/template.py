"""Any number of distinct random INT8 adapters, made fast: one is quantized, the others are its bytes turned round.

Values of a random adapter are alike wherever they stand, so turning them all by some places makes another random
adapter; its scales stay.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from bench.make_adapters import MODULES, linear_shapes, write_adapter
from common.adapter_format.base import read_linears
from common.adapter_format.packed import pack
from common.adapter_format.quantize import quantize
from common.adapter_format.validate import WEIGHTS_FILE, validate
from loraplex.manifest import MAX_HEADER_BYTES, read_manifest
from loraplex.peft_folder import CONFIG_FILE
from loraplex.safetensors_header import read_header

_TURN: tuple[int, int] = (104_729, 7)
"""Places that values turn per adapter, and that the first turns: a prime, so that no two are alike."""


class AdapterTemplate:
    """A packed adapter on all linears of a base, and what others are made from."""

    def __init__(self, head: bytes, values: NDArray[np.int8]) -> None:
        self._head, self._values = head, values

    @property
    def num_bytes(self) -> int:
        """Size of each file."""
        return len(self._head) + self._values.nbytes

    @classmethod
    def make(cls, base: Path, *, rank: int, scratch: Path) -> Self:
        """Quantize a random adapter for the base in a folder."""
        shapes = linear_shapes(base, MODULES)
        made = write_adapter(scratch / "template", shapes, rank=rank, dtype="bfloat16", seed=0)
        exact = validate((made / CONFIG_FILE).read_bytes(), made / WEIGHTS_FILE, read_linears(read_manifest(base)))
        file = scratch / "template.packed"
        pack(quantize(exact, "int8").adapter, file)
        tensors = read_header(file, max_header_bytes=MAX_HEADER_BYTES).tensors.values()
        start = min(tensor.start for tensor in tensors if tensor.dtype == "I8")  # scales come first
        data = file.read_bytes()
        return cls(data[:start], np.frombuffer(data, np.int8, offset=start))

    def write(self, number: int, file: Path) -> Path:
        """Write adapter `number`, which differs from all others."""
        step, first = _TURN
        file.write_bytes(self._head + np.roll(self._values, first + number * step).tobytes())
        return file
