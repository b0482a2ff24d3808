"""Programs that are recorded once and played again: steps of one size differ in little but the data they point to.

While a program is recorded, results get room in a workspace, and a room is given to a later operator as soon as the
caller has dropped the tensor in it: operators are executed in the order of the program, so whatever reads the room has
read it by then. When a step's operators come as recorded, their rows and rooms are the tape's; from the first one that
does not, the rest of the step is recorded afresh.
"""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.kernels.cpu.program import OPERATION, ROW

MOST_TAPES: Final = 64
"""Sizes of steps that are remembered, the latest used."""
_SLAB_FLOATS: Final = 2**20
_SLACK: Final = 3
_SPARE_FLOATS: Final = 2**24
"""The workspace may be so many times what the largest step needs, and 64 MiB; then it is begun anew."""
_ALIGNED_FLOATS: Final = 16

Key = tuple[int, ...]
_Place = tuple[int, int]
"""Slab and first number in it."""


class Workspace:
    """Memory for results, in slabs that stay where they are."""

    def __init__(self) -> None:
        self._slabs: list[Tensor] = []
        self.size = 0
        """Numbers in all slabs."""

    def place(self, size: int, after: _Place) -> _Place:
        """Return where `size` numbers fit at or after a place, in order of slabs."""
        slab, start = after
        while slab < len(self._slabs):
            if start + size <= len(self._slabs[slab]):
                return slab, start
            slab, start = slab + 1, 0
        # A power of two: for a step that is a little larger than the one before they are large enough.
        self._slabs.append(torch.empty(max(1 << (size - 1).bit_length(), _SLAB_FLOATS)))
        self.size += len(self._slabs[-1])
        return slab, 0

    def room(self, place: _Place, shape: tuple[int, int]) -> Tensor:
        """Return the tensor of float32 at a place."""
        slab, start = place
        return self._slabs[slab][start : start + math.prod(shape)].view(shape)


@dataclass(slots=True)
class _Operator:
    """One operator: what it was called with, its rows in the program, and where its result lies."""

    key: Key
    rows: int
    place: _Place
    shape: tuple[int, int] | None
    """None for an operator without a result."""
    result: Tensor | None = None
    """The result's room; kept only by finished tapes, as a tensor that lives keeps its room."""


@dataclass(slots=True)
class Tape:
    """A step's operators and their program."""

    operators: list[_Operator] = field(default_factory=list)
    program: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, ROW), dtype=np.int64))
    end: _Place = (0, 0)
    """Behind the last room."""
    size: int = 0
    """Numbers in all of its rooms."""
    remembered: tuple[Tensor, ...] | None = None
    """Results of the whole step, where it was executed in one."""
    rows_of: dict[int, NDArray[np.int64]] = field(default_factory=dict)
    """Which rows of the program are an operation's, for those that were asked for."""

    def rewrite(self, operation: int, values: Mapping[int, int]) -> None:
        """Write the same values, by column, into all rows of an operation."""
        rows = self.rows_of.get(operation)
        if rows is None:
            rows = self.rows_of[operation] = np.flatnonzero(self.program[:, OPERATION] == operation)
        self.program[rows[:, None], list(values)] = list(values.values())


class Tapes:
    """The tapes of a model's steps, by what tells steps of one kind."""

    def __init__(self) -> None:
        self.workspace = Workspace()
        self._tapes: OrderedDict[Key, Tape] = OrderedDict()
        self._largest = 0

    def find(self, kind: Key) -> Tape:
        """Return the tape of a kind of steps, an empty one if there is none; other steps' results are lost."""
        if self.workspace.size > _SLACK * self._largest + _SPARE_FLOATS:
            # Steps of many sizes have left slabs that none of them fills.
            self.workspace, self._largest = Workspace(), 0
            self._tapes.clear()
        tape = self._tapes.pop(kind, None)
        if tape is None:
            return Tape()
        self._tapes[kind] = tape
        return tape

    def keep(self, kind: Key, tape: Tape) -> None:
        """Remember a tape, and forget the one that was not used for longest."""
        for operator in tape.operators:
            if operator.shape is not None:
                operator.result = self.workspace.room(operator.place, operator.shape)
        self._largest = max(self._largest, tape.size)
        self._tapes[kind] = tape
        if len(self._tapes) > MOST_TAPES:
            self._tapes.popitem(last=False)

    def forget(self, kind: Key) -> None:
        """Let the next step of a kind be recorded afresh."""
        self._tapes.pop(kind, None)


class Recorder:
    """One step: plays its kind's tape as far as it goes, and records what goes beyond."""

    def __init__(self, tapes: Tapes, kind: Key) -> None:
        self._tapes, self._kind = tapes, kind
        self._tape = tapes.find(kind)
        self._fresh = not self._tape.operators
        self._playing = not self._fresh
        self._next = self._row = self._executed = self._parts = 0
        self._rows: list[tuple[int, ...]] = []
        """Of operators that were not on the tape."""
        self._free: dict[int, list[_Place]] = {}
        self._rooms: dict[int, weakref.ref[Tensor]] = {}
        self._end = self._tape.end
        self._alive: list[object] = []

    def result(self, key: Key, shape: tuple[int, int], *reads: Tensor) -> tuple[bool, Tensor]:
        """Begin an operator that is called with `key` and the tensors it reads.

        Returns whether its rows are on the tape already, and the room for its result, float32.
        """
        key += (*shape, *[tensor.data_ptr() for tensor in reads])
        operator = self._play(key, reads)
        if operator is not None and operator.result is not None:
            return True, operator.result
        place, room = self._room(shape)
        self._record(_Operator(key, 0, place, shape), reads)
        return False, room

    def change(self, key: Key, *tensors: Tensor) -> bool:
        """Begin an operator that changes a tensor, and has no result; returns whether it is on the tape already."""
        key += (*tensors[0].shape, *[tensor.data_ptr() for tensor in tensors])
        if self._play(key, tensors) is not None:
            return True
        self._record(_Operator(key, 0, (0, 0), None), tensors)
        return False

    def note(self, *row: int) -> None:
        """Add a row of the operator that is not on the tape."""
        self._rows.append(row)
        if self._fresh:
            self._tape.operators[-1].rows += 1

    def renew(self, back: int, *row: int) -> None:
        """Write a row of the operator on the tape anew, `back` rows before its end."""
        self._tape.program[self._row - back, : len(row)] = row

    def rest(self) -> NDArray[np.int64]:
        """Return the rows that were not returned before, to be executed."""
        played = self._tape.program[self._executed : self._row]
        if not self._rows:
            self._executed = self._row
            return played
        rows = np.zeros((len(self._rows), ROW), dtype=np.int64)
        for to, row in zip(rows, self._rows, strict=True):
            to[: len(row)] = row
        self._rows.clear()
        if self._fresh:
            self._tape.program = np.concatenate([self._tape.program, rows])
            self._row = self._executed = len(self._tape.program)
            return rows
        self._executed = self._row
        return np.concatenate([played, rows]) if len(played) else rows

    @property
    def whole(self) -> Tape | None:
        """The tape, if it is one of a step that remembered its results and nothing was done yet."""
        return self._tape if self._tape.remembered is not None and not self._next and self._playing else None

    def remember(self, *results: Tensor) -> None:
        """Note the results of a step that was recorded and executed in one."""
        if self._parts != 1:
            return
        if self._fresh:
            self._tape.remembered = results
        elif self._tape.remembered is None:  # it was recorded by a step in parts, a prompt's say
            self._tapes.forget(self._kind)

    def executed(self) -> None:
        """Let go of what executed rows pointed to."""
        self._parts += 1
        self._alive.clear()
        if self._fresh:
            self._tape.end = self._end
            self._tapes.keep(self._kind, self._tape)

    def _play(self, key: Key, tensors: tuple[Tensor, ...]) -> _Operator | None:
        """Return the tape's next operator if it is this one; no more are played otherwise."""
        operators = self._tape.operators
        if not self._playing or self._next == len(operators) or operators[self._next].key != key:
            self._playing = False
            return None
        operator = operators[self._next]
        self._alive += tensors
        self._next += 1
        self._row += operator.rows
        return operator

    def _record(self, operator: _Operator, tensors: tuple[Tensor, ...]) -> None:
        # A tensor that the caller gave is kept; one that has a room must not be, or it would never be dropped.
        self._alive += [tensor for tensor in tensors if id(tensor) not in self._rooms]
        if self._fresh:
            self._tape.operators.append(operator)

    def _room(self, shape: tuple[int, int]) -> tuple[_Place, Tensor]:
        size = -(-math.prod(shape) // _ALIGNED_FLOATS) * _ALIGNED_FLOATS
        free = self._free.setdefault(size, [])
        if free:
            place = free.pop()
        else:
            place = self._tapes.workspace.place(size, self._end)
            self._end = (place[0], place[1] + size)
            if self._fresh:
                self._tape.size += size
        room = self._tapes.workspace.room(place, shape)
        number = id(room)

        def dropped(_: weakref.ref[Tensor]) -> None:
            del self._rooms[number]
            free.append(place)

        self._rooms[number] = weakref.ref(room, dropped)
        return place, room
