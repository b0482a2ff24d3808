"""`Kernels` for CPUs: a step's operators are noted as a program, which a pool of threads executes when it is complete.

Activations are float32, contiguous. Nothing is computed before `finish`: the tensors returned until then are room for
results (`tape`).
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.kernels.cpu.elementwise import rows_at_once
from worker.kernels.cpu.linear import pack_linear, packed_kind, panels_per_task
from worker.kernels.cpu.panels import PANEL_OUTPUTS
from worker.kernels.cpu.plan import adapter_items, attention_items, block_tables
from worker.kernels.cpu.pool import Pool
from worker.kernels.cpu.program import ADAPTERS, EMBED_IDS, POSITIONS, ROW, SEEN, SLOTS, TASKS, Op
from worker.kernels.cpu.tape import Recorder, Tapes
from worker.kernels.draws import Draws
from worker.kernels.layout import Arena, Batch, Site
from worker.kernels.linear import Linear


class CpuBackend:
    """`Backend` of the kernels for CPUs, whose steps a pool executes."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def pack(self, linear: Linear) -> Linear:
        """See Backend."""
        return pack_linear(linear)

    def bind(self, arena: Arena, cos: Tensor, sin: Tensor) -> CpuKernels:
        """See Backend."""
        return CpuKernels(arena, cos, sin, self._pool)


class CpuKernels:
    """`Kernels` bound to an arena in host memory. Only one thread may compute at a time."""

    def __init__(self, arena: Arena, cos: Tensor, sin: Tensor, pool: Pool) -> None:
        """cos, sin [positions, D/2] float32."""
        self.arena, self.pool = arena, pool
        self.cos, self.sin = cos.contiguous(), sin.contiguous()
        self.tapes = Tapes()
        self._largest: dict[int, tuple[Tensor, Tensor]] = {}
        self._candidates = np.empty((3, 0), dtype=np.int32)  # room for `drawing`: 4 bytes each, two of them floats

    def step(self, batch: Batch) -> CpuStep:
        """See Kernels."""
        return CpuStep(self, batch)

    def room_for_largest(self, rows: int) -> tuple[Tensor, Tensor]:
        """Return room for so many numbers and their places, the same for the same number."""
        if rows not in self._largest:
            self._largest[rows] = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
        return self._largest[rows]

    def draw(self, logits: Tensor, draws: Draws) -> Tensor:
        """See Drawing."""
        rows, size = np.ascontiguousarray(draws.rows, dtype=np.int64), logits.shape[1]
        columns = (draws.temperature, draws.top_k, draws.top_p, draws.min_p, draws.uniform)
        parameters = np.ascontiguousarray(np.stack([np.asarray(one, dtype=np.float64) for one in columns], axis=1))
        if self._candidates.shape[1] < len(rows) * size:
            self._candidates = np.empty((3, len(rows) * size), dtype=np.int32)
        tokens = np.empty(len(rows), dtype=np.int64)
        program = np.zeros((1, ROW), dtype=np.int64)
        room = [int(part.ctypes.data) for part in self._candidates]
        program[0, :11] = (
            *(Op.DRAW, len(rows), logits.data_ptr(), size, rows.ctypes.data, len(rows)),
            *(parameters.ctypes.data, *room, tokens.ctypes.data),
        )
        self.pool.run(program)
        return torch.from_numpy(tokens)


class CpuStep:
    """`StepKernels` over one batch. A returned tensor's room is used again once the tensor is dropped."""

    def __init__(self, kernels: CpuKernels, batch: Batch) -> None:
        self._kernels = kernels
        self._kept: list[object] = [batch]
        shape, kv = kernels.arena.shape, kernels.arena.kv
        self._heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
        cache = (kv.data_ptr(), kv.numel(), int(kv.dtype == torch.bfloat16))
        self._attention = (shape.block_elements, self._keep(batch.positions), *cache)
        self._slots = self._keep(batch.slots)
        tables, items = block_tables(batch.requests), attention_items(batch.requests)
        self._seen = (self._keep(tables), *tables.shape, self._keep(items), len(items))
        lora_items, adapters = adapter_items(batch.requests)
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
        # Steps of prompts and of answers differ in what they do at their end.
        answers = len(batch.requests) == len(batch.positions)
        kind = (len(batch.positions), bool(adapters), answers)
        # And those with embeddings or heads of adapters come in parts that are others every time.
        self._recorder = Recorder(kernels.tapes, (*kind, True) if batch.changes_vocabulary else kind)

    def embed(self, embedding: Linear, token_ids: Tensor) -> Tensor:
        """See StepKernels."""
        inner, scales = embedding.in_features, embedding.scales
        parts = _parts(embedding)
        self._kept.append(token_ids)
        known, out = self._recorder.result((Op.EMBED,), (len(token_ids), inner), *parts)
        row = (
            *(Op.EMBED, len(token_ids), packed_kind(embedding), embedding.weight.data_ptr(), inner),
            *(0 if scales is None else scales.data_ptr(), token_ids.data_ptr(), len(token_ids), out.data_ptr()),
        )
        self._write(known, 1, *row)
        return out

    def linear(self, linear: Linear, x: Tensor) -> Tensor:
        """See StepKernels."""
        outputs, inner = linear.out_features, linear.in_features
        parts = _parts(linear)
        known, y = self._recorder.result((Op.LINEAR,), (x.shape[0], outputs), x, *parts)
        if not known:
            per_task = panels_per_task(outputs)
            tasks = -(-outputs // (per_task * PANEL_OUTPUTS))
            weight, bias, *scales = [part.data_ptr() for part in parts]
            sides = (packed_kind(linear), x.data_ptr(), len(x), inner)
            rest = (weight, outputs, scales[0] if scales else 0, bias, y.data_ptr(), per_task)
            self._recorder.note(Op.LINEAR, tasks, *sides, *rest)
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See StepKernels."""
        known, out = self._recorder.result((Op.RMS_NORM,), _shape(x), x, weight)
        if not known:
            sides = (x.data_ptr(), *x.shape, weight.data_ptr(), _bits(eps), out.data_ptr())
            self._recorder.note(Op.RMS_NORM, _row_tasks(*_shape(x)), *sides)
        return out

    def add_rms_norm(self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See StepKernels."""
        shape = _shape(residual)
        known, out = self._recorder.result((Op.ADD_RMS_NORM,), shape, residual, delta, weight)
        if not known:
            rest = (weight.data_ptr(), _bits(eps), out.data_ptr(), delta.data_ptr())
            self._recorder.note(Op.ADD_RMS_NORM, _row_tasks(*shape), residual.data_ptr(), *shape, *rest)
        return out

    def add(self, residual: Tensor, delta: Tensor) -> None:
        """See StepKernels."""
        if not self._recorder.change((Op.ADD,), residual, delta):
            shape = _shape(residual)
            self._recorder.note(Op.ADD, _row_tasks(*shape), residual.data_ptr(), *shape, delta.data_ptr())

    def attention(self, qkv: Tensor, layer: int, qk_norm: Tensor | None, eps: float) -> Tensor:
        """See StepKernels."""
        heads, kv_heads, dim = self._heads
        rows = qkv.shape[0]
        known, out = self._recorder.result((Op.ATTEND,), (rows, heads * dim), qkv)
        block_elements, *rest = self._attention
        common = (qkv.data_ptr(), rows, *self._heads, block_elements, layer, *rest)
        norm = (0, 0) if qk_norm is None else (qk_norm.data_ptr(), len(qk_norm))
        cos, sin = self._kernels.cos, self._kernels.sin
        tables = (cos.data_ptr(), sin.data_ptr(), len(cos))
        self._write(
            known,
            2,
            Op.ROTATE_AND_STORE,
            _row_tasks(rows, qkv.shape[1]),
            *common,
            *norm,
            _bits(eps),
            *tables,
            self._slots,
        )
        self._write(known, 1, Op.ATTEND, self._seen[-1] * kv_heads, *common, *self._seen, out.data_ptr())
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See StepKernels."""
        rows, both = _shape(gate_up)
        known, out = self._recorder.result((Op.SILU_MUL,), (rows, both // 2), gate_up)
        if not known:
            sides = (gate_up.data_ptr(), rows, both // 2, out.data_ptr())
            self._recorder.note(Op.SILU_MUL, _row_tasks(rows, both // 2), *sides)
        return out

    def lora_add(self, y: Tensor, x: Tensor, layer: int, site: Site) -> None:
        """See StepKernels."""
        if self._num_lora_items:
            place = layer * len(Site) + site
            known = self._recorder.change((Op.LORA_ADD, place), x, y)
            sides = (x.data_ptr(), x.shape[1], y.data_ptr(), y.shape[1])
            self._write(known, 1, Op.LORA_ADD, self._num_lora_items, *sides, *self._lora, place, *self._lora_items)

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """See StepKernels."""
        values, places = self._kernels.room_for_largest(len(logits))
        if not self._recorder.change((Op.LARGEST,), logits, values, places):
            sides = (logits.data_ptr(), *logits.shape, values.data_ptr(), places.data_ptr())
            self._recorder.note(Op.LARGEST, len(logits), *sides)
        return values, places

    def finish(self) -> None:
        """See StepKernels."""
        self._kernels.pool.run(self._recorder.rest())
        self._recorder.executed()

    def remember(self, *results: Tensor) -> None:
        """See Replaying."""
        self._recorder.remember(*results)

    def replay(self, token_ids: Tensor) -> tuple[Tensor, ...] | None:
        """See Replaying."""
        tape = self._recorder.whole
        if tape is None:
            return None
        positions = self._attention[1]
        tape.rewrite(Op.EMBED, {EMBED_IDS: token_ids.data_ptr()})
        tape.rewrite(Op.ROTATE_AND_STORE, {POSITIONS: positions, SLOTS: self._slots})
        seen = dict(zip(SEEN, self._seen, strict=True))
        tape.rewrite(Op.ATTEND, {TASKS: self._seen[-1] * self._heads[1], POSITIONS: positions, **seen})
        if self._num_lora_items:
            adapters = dict(zip(ADAPTERS, (*self._lora[1:5], *self._lora_items), strict=True))
            tape.rewrite(Op.LORA_ADD, {TASKS: self._num_lora_items, **adapters})
        self._kernels.pool.run(tape.program)
        return tape.remembered

    def _write(self, known: bool, back: int, *row: int) -> None:
        """Write a row that differs from step to step: the operator's `back`-th from its end, if that is on the tape."""
        if known:
            self._recorder.renew(back, *row)
        else:
            self._recorder.note(*row)

    def _keep(self, array: NDArray[Any]) -> int:
        """Return an array's address, and keep it to the end of the step."""
        self._kept.append(array)
        return int(array.ctypes.data)


def _parts(linear: Linear) -> tuple[Tensor, ...]:
    """Return a packed linear's weight, bias and, if it has them, scales."""
    if linear.bias is None:
        raise ValueError("the linear is not packed")
    return (linear.weight, linear.bias) if linear.scales is None else (linear.weight, linear.bias, linear.scales)


def _shape(tensor: Tensor) -> tuple[int, int]:
    rows, columns = tensor.shape
    return rows, columns


def _row_tasks(rows: int, columns: int) -> int:
    """Return how many tasks compute so many rows of so many numbers, each on its own."""
    return -(-rows // int(rows_at_once(columns)))


def _bits(value: float) -> int:
    """Return a number's bits, as a program carries it."""
    return int(struct.unpack("q", struct.pack("d", value))[0])
