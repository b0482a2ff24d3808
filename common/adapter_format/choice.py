"""Which way each module of an int4 adapter is stored: the least mean error within the bytes that it may take.

Pure arithmetic over candidates; knows nothing of how they were made.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from numpy.typing import NDArray

from common.adapter_format.modules import EMBEDDING, PackedMatrix, PackedModule, quantized_module
from common.adapter_format.packed import matrix_tensors, module_tensors
from common.adapter_format.parts import FORMAT_INT4, FORMAT_INT8, FORMAT_NONE, PackedPart, num_groups

INT4_BYTES: Final = 0.3
"""Most that an int4 adapter's bytes may be of its 16-bit bytes."""

_ENTRY_BYTES: Final = 70  # of a tensor's entry in the file's header, without its name


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to store a module, and the relative error of its weight."""

    parts: tuple[PackedPart, ...]
    error: float

    def module(self, name: str) -> PackedModule:
        """Return the module as it would be stored."""
        return quantized_module(name, self.parts)


def choose_affordable(modules: Sequence[PackedModule], options: Mapping[int, list[Candidate]]) -> dict[int, Candidate]:
    """Choose each module's candidate: the least mean error that INT4_BYTES of the 16-bit bytes can buy.

    Counts whole files, or the tensors alone where their many names in the header take the room already (tiny ranks).
    """
    if not options:
        return {}
    budgeted = [modules[at] for at in options]
    bytes_16 = sum(2 * m.rank * (m.in_features + m.out_features) for m in budgeted)
    names_16 = sum(2 * (len(m.name) + _ENTRY_BYTES) for m in budgeted)
    cheapest = {at: min(some, key=lambda one: (_cost(modules[at], one)[0], one.error)) for at, some in options.items()}
    total = [sum(costs) for costs in zip(*(_cost(modules[at], one) for at, one in cheapest.items()), strict=True)]
    with_names = total[0] + total[1] <= INT4_BYTES * (bytes_16 + names_16)
    room = INT4_BYTES * (bytes_16 + names_16) - sum(total) if with_names else INT4_BYTES * bytes_16 - total[0]
    chosen = dict(cheapest)

    def best_step(at: int) -> tuple[float, int, float, Candidate] | None:
        """Return the step from the chosen candidate that gains most per byte: (-gain per byte, at, bytes, to)."""
        steps = []
        tensors, names = _cost(modules[at], chosen[at])
        for one in options[at]:
            more_tensors, more_names = _cost(modules[at], one)
            more = more_tensors - tensors + (more_names - names if with_names else 0)
            if one.error < chosen[at].error and more > 0:
                steps.append(((one.error - chosen[at].error) / more, at, more, one))
        return min(steps, key=lambda step: step[0], default=None)

    heap = [step for at in options if (step := best_step(at))]
    heapq.heapify(heap)
    while heap:
        _, at, more, one = heapq.heappop(heap)
        if more <= room:
            room -= more
            chosen[at] = one
            if step := best_step(at):
                heapq.heappush(heap, step)
    return chosen


def _cost(module: PackedModule, candidate: Candidate) -> tuple[int, int]:
    """Return the bytes of a candidate's tensors and of their names and entries in the header."""
    tensors = module_tensors(candidate.module(module.name))
    return sum(array.nbytes for _, _, array in tensors), sum(len(name) + _ENTRY_BYTES for name, _, _ in tensors)


def estimated_bytes(modules: Sequence[PackedModule], form: str, matrices: Sequence[PackedMatrix] = ()) -> int:
    """Return about what a packed file of these modules (of format none) takes in `form`, from their shapes alone."""
    as_is = _tensors_bytes(matrix_tensors(matrices))
    as_is += sum(8 * module.out_features + 2 * (len(module.name) + _ENTRY_BYTES) for module in modules if module.affine)
    if form == FORMAT_NONE:
        return as_is + sum(_tensors_bytes(module_tensors(replace(module, affine=None))) for module in modules)
    int8 = [module for module in modules if form == FORMAT_INT8 or module.name == EMBEDDING]
    int4 = [module for module in modules if form == FORMAT_INT4 and module.name != EMBEDDING]
    return as_is + _int8_bytes(int8) + _int4_bytes(int4)


def _int8_bytes(modules: Sequence[PackedModule]) -> int:
    names = sum(3 * (len(module.name) + _ENTRY_BYTES) for module in modules)
    return sum(m.rank * (m.in_features + m.out_features + 4) for m in modules) + names


def _int4_bytes(modules: Sequence[PackedModule]) -> int:
    values = sum(m.rank * (m.in_features + m.out_features) for m in modules)
    names = sum(4 * (len(module.name) + _ENTRY_BYTES) for module in modules)
    scales = sum(2 * m.rank * (num_groups(m.in_features) + num_groups(m.out_features)) for m in modules)
    return max(values // 2 + scales + names, int(INT4_BYTES * 2 * values))


def _tensors_bytes(tensors: Iterable[tuple[str, str, NDArray[Any]]]) -> int:
    return sum(array.nbytes + len(name) + _ENTRY_BYTES for name, _, array in tensors)
