"""A step as a list of operations, and the compiled code by which several threads execute it together.

An operation is a row of int64: its code, its number of tasks, and addresses, sizes and numbers in the order its
function takes them (`run_task`). Tasks of one operation are independent; an operation starts when the one before is
complete.

Threads take tasks from one ticket. A thread that gets no core takes none, and nobody waits for it: the leader waits
only for tasks that have been begun, and meanwhile lets others have its core. (A barrier of all threads, as OpenMP's,
stops every step on a machine where something else wants a core.)
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final

import numpy as np
from numba import carray, njit

from worker.kernels.cpu.atomics import address, atomic_add, atomic_load, atomic_store, compare_and_set, yield_core
from worker.kernels.cpu.attention import attend
from worker.kernels.cpu.drawing import PARAMETERS, draw
from worker.kernels.cpu.elementwise import add, add_rms_norm, rms_norm, rows_at_once, silu_mul
from worker.kernels.cpu.largest import largest
from worker.kernels.cpu.linear import embed, linear
from worker.kernels.cpu.lora import lora_add
from worker.kernels.cpu.numbers import COMPILED
from worker.kernels.cpu.rotary import rotate_and_store
from worker.kernels.tiles import Field, Format


class Op(IntEnum):
    """What a row computes."""

    LINEAR = 0
    RMS_NORM = 1
    ADD_RMS_NORM = 2
    ADD = 3
    ROTATE_AND_STORE = 4
    ATTEND = 5
    SILU_MUL = 6
    LORA_ADD = 7
    EMBED = 8
    LARGEST = 9
    DRAW = 10


ROW: Final = 24
"""Numbers in a row."""

# Columns of every row, and those that differ between steps of one kind: what points to their tokens, blocks and
# adapters, and how many there are. `run_task` tells the others.
OPERATION, TASKS = 0, 1
EMBED_IDS: Final = 6
POSITIONS, SLOTS = 9, 19
SEEN: Final = range(13, 18)
TABLES, NUM_TABLES, TABLE_BLOCKS, ATTEND_ITEMS, NUM_ATTEND_ITEMS = SEEN
ADAPTERS: Final = (7, 8, 9, 10, 13, 14)
RECORDS, NUM_RECORDS, STARTS, NUM_ADAPTERS, LORA_ITEMS, NUM_LORA_ITEMS = ADAPTERS

# The words that threads share.
TICKET, DONE, CURRENT, ACTIVE, FAILED = 0, 8, 16, 24, 25  # a cache line apart, but for what is seldom written
STATE_WORDS: Final = 32

# A ticket: | sequence number | tasks | next task |. The sequence number makes a thread that was off its core fail to
# take a task by a ticket it had read before.
_TASK_BITS: Final = 20
MAX_TASKS: Final = (1 << _TASK_BITS) - 1
_SEQUENCE_MASK: Final = (1 << 22) - 1

_RECORD: Final = len(Field)
_FLOAT32, _BFLOAT16 = int(Format.FLOAT32), int(Format.BFLOAT16)
_LINEAR, _RMS_NORM, _ADD_RMS_NORM, _ADD, _ROTATE_AND_STORE = (int(op) for op in list(Op)[:5])
_ATTEND, _SILU_MUL, _LORA_ADD, _EMBED, _LARGEST, _DRAW = (int(op) for op in list(Op)[5:])


@njit(**COMPILED)
def _floats(at: Any, rows: Any, columns: Any) -> Any:
    return carray(address(at), (rows, columns), np.float32)


@njit(**COMPILED)
def _ints(at: Any, rows: Any, columns: Any) -> Any:
    return carray(address(at), (rows, columns), np.int64)


@njit(**COMPILED)
def _task_rows(rows: Any, columns: Any, task: int) -> Any:
    """Return the first row of a task that computes several, and the one after its last."""
    step = rows_at_once(columns)
    return task * step, min(rows, (task + 1) * step)


@njit(**COMPILED)
def run_task(p: Any, task: int) -> None:
    """Compute one task of the operation in row `p`."""
    op = p[OPERATION]
    if op == _LINEAR:  # kind, x, rows, inner, weight, outputs, scales, bias, y, panels of a task
        linear(p[2], p[3], p[4], p[5], p[6], p[7], p[8], p[9], p[10], p[11], task)
    elif op == _RMS_NORM:  # x, rows, columns, weight, eps, out
        first, end = _task_rows(p[3], p[4], task)
        weight = carray(address(p[5]), (p[4],), np.float32)
        rms_norm(_floats(p[2], p[3], p[4]), weight, _float(p, 6), _floats(p[7], p[3], p[4]), first, end)
    elif op == _ADD_RMS_NORM:  # residual, rows, columns, weight, eps, out, delta
        first, end = _task_rows(p[3], p[4], task)
        residual, weight = _floats(p[2], p[3], p[4]), carray(address(p[5]), (p[4],), np.float32)
        delta, out = _floats(p[8], p[3], p[4]), _floats(p[7], p[3], p[4])
        add_rms_norm(residual, delta, weight, _float(p, 6), out, first, end)
    elif op == _ADD:  # residual, rows, columns, delta
        first, end = _task_rows(p[3], p[4], task)
        add(_floats(p[2], p[3], p[4]), _floats(p[5], p[3], p[4]), first, end)
    elif op == _SILU_MUL:  # gate_up, rows, inner, out
        first, end = _task_rows(p[3], p[4], task)
        silu_mul(_floats(p[2], p[3], 2 * p[4]), _floats(p[5], p[3], p[4]), first, end)
    elif op == _LORA_ADD:
        # x, inner, y, outputs, arena, records, their number, starts, adapters, places, place, items, their number
        records, starts = _ints(p[RECORDS], p[NUM_RECORDS], _RECORD), _ints(p[STARTS], p[NUM_ADAPTERS], p[11] + 1)
        items = _ints(p[LORA_ITEMS], p[NUM_LORA_ITEMS], 3)
        lora_add(p[2], 4 * p[3], p[6], records, starts, p[12], items, p[4], 4 * p[5], task)
    elif op == _EMBED:  # kind, weight, inner, scales, ids, rows, out
        ids = carray(address(p[EMBED_IDS]), (p[7],), np.int64)
        embed(p[2], p[3], p[4], p[5], ids, _floats(p[8], p[7], p[4]), task)
    elif op == _LARGEST:  # x, rows, columns, values, places
        values, places = carray(address(p[5]), (p[3],), np.float32), carray(address(p[6]), (p[3],), np.int64)
        largest(_floats(p[2], p[3], p[4]), values, places, task)
    elif op == _DRAW:
        _draw_task(p, task)
    else:
        _attention_task(p, task)


@njit(**COMPILED)
def _attention_task(p: Any, task: int) -> None:
    # qkv, rows, Hq, Hk, D, elements of a block, layer, positions, cache, its elements, cache is bfloat16, then
    shape = (p[4], p[5], p[6], p[7])
    qkv = _floats(p[2], p[3], (p[4] + 2 * p[5]) * p[6])
    positions = carray(address(p[POSITIONS]), (p[3],), np.int64)
    if p[OPERATION] == _ROTATE_AND_STORE:  # norm, its rows, eps, cos, sin, positions in them, slots
        norm, cos, sin = _floats(p[13], p[14], p[6]), _floats(p[16], p[18], p[6] // 2), _floats(p[17], p[18], p[6] // 2)
        slots = carray(address(p[SLOTS]), (p[3],), np.int64)
        first, end = _task_rows(*qkv.shape, task)
        if p[12]:
            kv = carray(address(p[10]), (p[11],), np.uint16)
            rotate_and_store(qkv, norm, _float(p, 15), cos, sin, positions, kv, slots, shape, p[8], first, end)
        else:
            kv = carray(address(p[10]), (p[11],), np.float32)
            rotate_and_store(qkv, norm, _float(p, 15), cos, sin, positions, kv, slots, shape, p[8], first, end)
    else:  # tables, requests, blocks, items, their number, out
        tables = _ints(p[TABLES], p[NUM_TABLES], p[TABLE_BLOCKS])
        items = _ints(p[ATTEND_ITEMS], p[NUM_ATTEND_ITEMS], 3)
        kind = _BFLOAT16 if p[12] else _FLOAT32
        attend(p[2], qkv.strides[0], positions, kind, p[10], tables, items, shape, p[8], p[18], task)


@njit(**COMPILED)
def _draw_task(p: Any, task: int) -> None:
    # logits, columns, rows, their number, parameters, candidates, scratch, places, tokens
    size, number = p[3], p[5]
    row = carray(address(p[4]), (number,), np.int64)[task]
    logits = carray(address(p[2] + 4 * row * size), (size,), np.float32)
    parameters = carray(address(p[6]), (number, PARAMETERS), np.float64)
    at = 4 * task * size
    candidates, scratch = (
        carray(address(p[7] + at), (size,), np.float32),
        carray(address(p[8] + at), (size,), np.float32),
    )
    places = carray(address(p[9] + at), (size,), np.int32)
    tokens = carray(address(p[10]), (number,), np.int64)
    tokens[task] = draw(logits, parameters[task], candidates, scratch, places)


@njit(**COMPILED)
def _float(p: Any, index: int) -> Any:
    return np.float32(p[index : index + 1].view(np.float64)[0])


@njit(**COMPILED)
def _take_tasks(state: Any) -> bool:
    """Compute tasks of the current operation until none is left; returns whether there was one."""
    any_taken = False
    while True:
        ticket = atomic_load(state, TICKET)
        task, tasks = ticket & MAX_TASKS, (ticket >> _TASK_BITS) & MAX_TASKS
        if task >= tasks:
            return any_taken
        if compare_and_set(state, TICKET, ticket, ticket + 1):
            # The operation cannot end before this task has: its row stays where it is.
            row = carray(address(atomic_load(state, CURRENT)), (ROW,), np.int64)
            try:
                run_task(row, task)
            except Exception:  # noqa: BLE001 - all that is raised is MemoryError, which compiled code cannot name
                atomic_store(state, FAILED, 1)
            atomic_add(state, DONE, 1)
            any_taken = True


@njit(nogil=True, **COMPILED)
def lead(program: Any, state: Any) -> None:
    """Execute all rows of `program` [n, ROW] int64 in order, with whoever is in `follow` on the same state.

    A task that raises sets FAILED and counts as done: its operation ends first, so that nobody is left in the middle of
    it or waits for it, and then the program.
    """
    for index in range(len(program)):
        tasks = program[index, TASKS]
        atomic_store(state, DONE, 0)
        atomic_store(state, CURRENT, program[index].ctypes.data)
        sequence = ((atomic_load(state, TICKET) >> (2 * _TASK_BITS)) + 1) & _SEQUENCE_MASK
        atomic_store(state, TICKET, (sequence << (2 * _TASK_BITS)) | (tasks << _TASK_BITS))
        _take_tasks(state)
        waited = 0
        while atomic_load(state, DONE) < tasks:
            waited += 1
            if waited > 200:  # some tenths of a microsecond each
                yield_core()
        if atomic_load(state, FAILED):
            return


@njit(nogil=True, **COMPILED)
def follow(state: Any) -> None:
    """Compute tasks as they come while the state's ACTIVE word is set."""
    idle = 0
    while atomic_load(state, ACTIVE):
        if _take_tasks(state):
            idle = 0
        else:
            idle += 1
            if idle > 200:
                yield_core()
