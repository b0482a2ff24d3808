"""`Kernels` for CPUs: a step's operators are noted as a program, which a pool of threads executes when it is complete.

Activations are float32, contiguous. Nothing needs to be computed before `finish`: the tensors returned until then are
room for results. But a program keeps all of its intermediate results alive, so a long prompt's is executed in parts.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.kernels.cpu.attention import ROWS_AT_ONCE
from worker.kernels.cpu.elementwise import rows_at_once
from worker.kernels.cpu.linear import LINEAR_OUTPUTS
from worker.kernels.cpu.lora import LORA_ROWS_AT_ONCE
from worker.kernels.cpu.pool import Pool
from worker.kernels.cpu.program import ROW, Op
from worker.kernels.layout import Arena, Batch, Rows, Site
from worker.kernels.linear import Linear
from worker.kernels.tiles import PlacedAdapter

PART_BYTES: Final = 2**26
"""Results of a program's operations after which it is executed without waiting for more."""


class CpuKernels:
    """`Kernels` bound to an arena in host memory. Only one thread may compute at a time."""

    def __init__(self, arena: Arena, cos: Tensor, sin: Tensor, pool: Pool) -> None:
        """cos, sin [positions, D/2] float32."""
        self.arena, self.pool = arena, pool
        self.cos, self.sin = cos.contiguous(), sin.contiguous()
        self._zeros = torch.zeros(0)

    def step(self, batch: Batch) -> CpuStep:
        """See Kernels."""
        return CpuStep(self, batch)

    def zeros(self, count: int) -> Tensor:
        """Return at least `count` zeros, that live as long as this."""
        if len(self._zeros) < count:
            self._zeros = torch.zeros(count)
        return self._zeros


class CpuStep:
    """`StepKernels` over one batch."""

    def __init__(self, kernels: CpuKernels, batch: Batch) -> None:
        self._kernels = kernels
        self._program: list[tuple[int, ...]] = []
        self._alive: list[object] = [batch]  # what the program's addresses point to
        shape, kv = kernels.arena.shape, kernels.arena.kv
        self._heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
        cache = (kv.data_ptr(), kv.numel(), int(kv.dtype == torch.bfloat16))
        self._attention = (shape.block_elements, self._keep(batch.positions), *cache)
        self._slots = self._keep(batch.slots)
        tables, items = _tables(batch.requests), _items(batch.requests)
        self._seen = (self._keep(tables), *tables.shape, self._keep(items), len(items))
        lora_items, adapters = _adapter_items(batch.requests)
        if adapters:
            before = np.cumsum([0, *[len(adapter.records) for adapter in adapters[:-1]]])
            records = np.concatenate([adapter.records for adapter in adapters])
            starts = np.stack([adapter.starts for adapter in adapters]) + before[:, None]
            self._lora = (
                *(kernels.arena.memory.data_ptr(), self._keep(records), len(records)),
                *(self._keep(starts), len(starts), starts.shape[1] - 1),
            )
            self._lora_items = (self._keep(lora_items), len(lora_items))
        self._num_lora_items = len(lora_items)
        self._num_kept = len(self._alive)  # to the end of the step
        self._room_bytes = 0

    def linear(self, linear: Linear, x: Tensor) -> Tensor:
        """See StepKernels."""
        weight = linear.weight
        outputs, inner = weight.shape
        bias = self._kernels.zeros(outputs) if linear.bias is None else linear.bias
        y = self._room(len(x), outputs)
        rest = (self._at(weight), outputs, self._at(bias), self._at(y), int(weight.dtype == torch.bfloat16))
        self._note(Op.LINEAR, -(-outputs // LINEAR_OUTPUTS), self._at(x), len(x), inner, *rest)
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See StepKernels."""
        out = self._room(*x.shape)
        self._note(Op.RMS_NORM, _row_tasks(x), self._at(x), *x.shape, self._at(weight), _bits(eps), self._at(out))
        return out

    def add_rms_norm(self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See StepKernels."""
        out = self._room(*residual.shape)
        rest = (self._at(weight), _bits(eps), self._at(out), self._at(delta))
        self._note(Op.ADD_RMS_NORM, _row_tasks(residual), self._at(residual), *residual.shape, *rest)
        return out

    def add(self, residual: Tensor, delta: Tensor) -> None:
        """See StepKernels."""
        self._note(Op.ADD, _row_tasks(residual), self._at(residual), *residual.shape, self._at(delta))

    def attention(self, qkv: Tensor, layer: int, qk_norm: Tensor | None, eps: float) -> Tensor:
        """See StepKernels."""
        block_elements, *rest = self._attention
        common = (self._at(qkv), len(qkv), *self._heads, block_elements, layer, *rest)
        norm = (0, 0) if qk_norm is None else (self._at(qk_norm), len(qk_norm))
        cos, sin = self._kernels.cos, self._kernels.sin
        tables = (self._at(cos), self._at(sin), len(cos))
        self._note(Op.ROTATE_AND_STORE, _row_tasks(qkv), *common, *norm, _bits(eps), *tables, self._slots)
        heads, kv_heads, dim = self._heads
        out = self._room(len(qkv), heads * dim)
        self._note(Op.ATTEND, self._seen[-1] * kv_heads, *common, *self._seen, self._at(out))
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See StepKernels."""
        out = self._room(len(gate_up), gate_up.shape[1] // 2)
        self._note(Op.SILU_MUL, _row_tasks(out), self._at(gate_up), *out.shape, self._at(out))
        return out

    def lora_add(self, y: Tensor, x: Tensor, layer: int, site: Site) -> None:
        """See StepKernels."""
        if self._num_lora_items:
            sides = (self._at(x), x.shape[1], self._at(y), y.shape[1])
            place = layer * len(Site) + site
            self._note(Op.LORA_ADD, self._num_lora_items, *sides, *self._lora, place, *self._lora_items)

    def finish(self) -> None:
        """See StepKernels."""
        program = np.zeros((len(self._program), ROW), dtype=np.int64)
        for row, values in zip(program, self._program, strict=True):
            row[: len(values)] = values
        self._kernels.pool.run(program)
        self._program.clear()
        del self._alive[self._num_kept :]
        self._room_bytes = 0

    def _room(self, *shape: int) -> Tensor:
        room = torch.empty(shape)
        self._room_bytes += room.nbytes
        return room

    def _at(self, tensor: Tensor) -> int:
        """Return a tensor's address, and keep it for as long as the program may be executed."""
        self._alive.append(tensor)
        return tensor.data_ptr()

    def _keep(self, array: NDArray[Any]) -> int:
        self._alive.append(array)
        return int(array.ctypes.data)

    def _note(self, *row: int) -> None:
        self._program.append(row)
        if self._room_bytes > PART_BYTES:
            self.finish()


def _row_tasks(rows: Tensor) -> int:
    """Return how many tasks compute so many rows of so many numbers, each on its own."""
    return -(-len(rows) // int(rows_at_once(rows.shape[1])))


def _bits(value: float) -> int:
    """Return a number's bits, as a program carries it."""
    return int(struct.unpack("q", struct.pack("d", value))[0])


def _tables(requests: Sequence[Rows]) -> NDArray[np.int64]:
    tables = np.zeros((len(requests), max(len(request.block_ids) for request in requests)), dtype=np.int64)
    for index, request in enumerate(requests):
        tables[index, : len(request.block_ids)] = request.block_ids
    return tables


def _items(requests: Sequence[Rows]) -> NDArray[np.int64]:
    """Cut requests into pieces of rows for `attend`: (request, first row, rows)."""
    items = [
        (index, first, min(ROWS_AT_ONCE, request.start + request.count - first))
        for index, request in enumerate(requests)
        for first in range(request.start, request.start + request.count, ROWS_AT_ONCE)
    ]
    return np.array(items, dtype=np.int64)


def _adapter_items(requests: Sequence[Rows]) -> tuple[NDArray[np.int64], list[PlacedAdapter]]:
    """Cut the rows that have an adapter into pieces for `lora_add`: (adapter, first row, rows); and the adapters."""
    adapters: list[PlacedAdapter] = []
    ends: list[list[int]] = []  # of each adapter's rows, which are neighbours
    for request in requests:
        if request.adapter is None:
            continue
        end = request.start + request.count
        if adapters and adapters[-1] is request.adapter:
            ends[-1][1] = end
        else:
            adapters.append(request.adapter)
            ends.append([request.start, end])
    items = []
    for index, (start, end) in enumerate(ends):
        first = start
        while first < end:
            left = end - first
            # Seven or eight are better shared by two threads than split into many and few.
            count = left // 2 if left in (7, 8) else min(left, LORA_ROWS_AT_ONCE)
            items.append((index, first, count))
            first += count
    return np.array(items, dtype=np.int64), adapters
