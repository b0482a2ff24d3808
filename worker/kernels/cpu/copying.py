"""An adapter's pieces from a mapped file into the arena, in one call that holds no lock of Python's.

A program is a row a piece: what to do, where from, where to, and how much. It says nothing of which file or which
chunks, so one serves every adapter whose file lies alike.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from worker.kernels.cpu.atomics import address
from worker.kernels.cpu.vectors import BYTE, EXACT


class Copy(IntEnum):
    """What a row does. Places are in bytes."""

    FILE = 0
    """AMOUNT bytes of the file."""
    CONSTANTS = 1
    """AMOUNT bytes of what the program brings along."""
    TURNED_16 = 2
    """ROWS rows of AMOUNT numbers of 16 bits; the file holds number n of row j at FROM + 2 · (n · STRIDE + j)."""
    TURNED_32 = 3
    """The same of 32 bits."""


class Column(IntEnum):
    """The columns of a row."""

    COPY = 0
    FROM = 1
    TO = 2
    """As if the chunks were neighbours."""
    AMOUNT = 3
    ROWS = 4
    STRIDE = 5


# Compiled code knows plain numbers only.
_FILE, _CONSTANTS, _TURNED_16 = int(Copy.FILE), int(Copy.CONSTANTS), int(Copy.TURNED_16)
_COPY, _FROM, _TO, _AMOUNT, _ROWS, _STRIDE = (int(column) for column in Column)
_TABLE: Final = types.Array(types.int64, 2, "C")
CARRY_OUT: Final = (_TABLE, *[types.int64] * 3, types.Array(types.int64, 1, "C"), types.int64)
IS_SOUND: Final = (_TABLE, types.int64)
"""What the functions here are compiled for."""


@intrinsic
def _copy_bytes(typingctx: Any, to: Any, source: Any, count: Any) -> Any:  # noqa: ARG001 - the types are the signature
    """Copy `count` bytes from one address to another."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        to, source = (builder.inttoptr(one, BYTE.as_pointer()) for one in arguments[:2])
        cgutils.raw_memcpy(builder, to, source, arguments[2], ir.Constant(ir.IntType(64), 1))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@njit(nogil=True, **EXACT)
def carry_out(program: Any, file: int, constants: int, arena: int, chunk_ids: Any, chunk_bytes: int) -> None:
    """Carry out a program, [n, 6] int64 (`Column`), in its order.

    Addresses of the mapped file, of the constants and of the arena; chunk_ids [c] int64: where the chunks lie that the
    program takes for neighbours.
    """
    for index in range(len(program)):
        row = program[index]
        chunk = row[_TO] // chunk_bytes
        to = arena + chunk_ids[chunk] * chunk_bytes + row[_TO] - chunk * chunk_bytes
        what, amount = row[_COPY], row[_AMOUNT]
        if what == _FILE:
            _copy_bytes(to, file + row[_FROM], amount)
        elif what == _CONSTANTS:
            _copy_bytes(to, constants + row[_FROM], amount)
        else:
            rows, stride = row[_ROWS], row[_STRIDE]
            if what == _TURNED_16:
                narrow = carray(address(file + row[_FROM]), (amount, stride), np.int16)
                narrow_out = carray(address(to), (rows, amount), np.int16)
                for j in range(rows):
                    for n in range(amount):
                        narrow_out[j, n] = narrow[n, j]
            else:
                wide = carray(address(file + row[_FROM]), (amount, stride), np.int32)
                wide_out = carray(address(to), (rows, amount), np.int32)
                for j in range(rows):
                    for n in range(amount):
                        wide_out[j, n] = wide[n, j]


class Check(IntEnum):
    """The columns of a row of what `is_sound` looks at."""

    FROM = 0
    COUNT = 1
    BITS = 2
    """Of a number: 16 or 32."""
    SIGNED = 3
    """Whether numbers below 0 are sound."""


_CHECK_FROM, _COUNT, _BITS, _SIGNED = (int(column) for column in Check)


@njit(nogil=True, **EXACT)
def is_sound(checks: Any, file: int) -> bool:
    """Tell whether the floats of all rows of `checks`, [n, 4] int64, are finite and, where asked, not below 0.

    Rows as `Check` has them; by the bits, and -0 is not below 0.
    """
    for index in range(len(checks)):
        at, count, signed = file + checks[index, _CHECK_FROM], checks[index, _COUNT], checks[index, _SIGNED] != 0
        if checks[index, _BITS] == 32:
            wide = carray(address(at), (count,), np.uint32)
            for n in range(count):
                size = wide[n] & np.uint32(0x7FFFFFFF)
                if size >= np.uint32(0x7F800000) or (not signed and wide[n] > np.uint32(0x80000000)):
                    return False
        else:
            narrow = carray(address(at), (count,), np.uint16)
            for n in range(count):
                short = np.uint32(narrow[n])
                if short & np.uint32(0x7FFF) >= np.uint32(0x7C00) or (not signed and short > np.uint32(0x8000)):
                    return False
    return True
