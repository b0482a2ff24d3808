"""The oracle: every kernel in plain float32 torch, written for reading, one row or head at a time. Slow on purpose."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.kernels.layout import Arena, Batch, Rows, Site
from worker.kernels.linear import Linear
from worker.kernels.tiles import AFFINE, Field, read_affine, read_tile


class ReferenceBackend:
    """`Backend` of the oracle."""

    def pack(self, linear: Linear) -> Linear:
        """See Backend."""
        return linear

    def bind(self, arena: Arena, cos: Tensor, sin: Tensor) -> ReferenceKernels:
        """See Backend."""
        return ReferenceKernels(arena, cos, sin)


class ReferenceKernels:
    """`Kernels` and `StepKernels` by their formulas, on a CPU."""

    def __init__(self, arena: Arena, cos: Tensor, sin: Tensor) -> None:
        """cos, sin [positions, D/2] float32."""
        self._arena, self._cos, self._sin = arena, cos, sin
        self._batch: Batch

    def step(self, batch: Batch) -> ReferenceKernels:
        """See Kernels."""
        self._batch = batch
        return self

    def embed(self, embedding: Linear, token_ids: Tensor) -> Tensor:
        """See StepKernels."""
        return _weight_of(embedding)[token_ids]

    def linear(self, linear: Linear, x: Tensor) -> Tensor:
        """See StepKernels."""
        y = x.float() @ _weight_of(linear).T
        if linear.bias is not None:
            y = y + linear.bias.float()
        return y.to(x.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See StepKernels."""
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See StepKernels."""
        residual += delta
        return rms_norm(residual, weight, eps)

    def add(self, residual: Tensor, delta: Tensor) -> None:
        """See StepKernels."""
        residual.add_(delta)

    def attention(self, qkv: Tensor, layer: int, qk_norm: Tensor | None, eps: float) -> Tensor:
        """See StepKernels."""
        shape = self._arena.shape
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        q_k_v = qkv.view(len(qkv), -1, shape.head_dim).float()
        q_k, v = q_k_v[:, : heads + kv_heads], q_k_v[:, heads + kv_heads :]
        if qk_norm is not None:
            q_k = rms_norm(q_k, qk_norm, eps)
        positions = torch.from_numpy(self._batch.positions)
        q_k = rotate(q_k, self._cos[positions, None], self._sin[positions, None])
        q, k = q_k[:, :heads], q_k[:, heads:]
        kv = self._arena.kv
        for row, slot in enumerate(self._batch.slots.tolist()):
            block, offset = divmod(slot, kv.shape[4])
            kv[block, layer, 0, :, offset] = k[row].to(kv.dtype)
            kv[block, layer, 1, :, offset] = v[row].to(kv.dtype)
        out = torch.zeros(len(qkv), heads * shape.head_dim)
        for request in self._batch.requests:
            for row in range(request.start, request.start + request.count):
                length = request.position + row - request.start + 1
                out[row] = _attend(q[row], *self._seen(request, layer, length)).flatten()
        return out.to(qkv.dtype)

    def _seen(self, request: Rows, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values [Hk, length, D] of a request's first positions."""
        blocks = self._arena.kv[list(request.block_ids), layer].float()  # [n, 2, Hk, block, D]
        keys, values = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
        return keys, values

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See StepKernels."""
        return silu_mul(gate_up)

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """See StepKernels."""
        return logits.amax(dim=-1).float(), logits.argmax(dim=-1)

    def finish(self) -> None:
        """See StepKernels."""

    def lora_add(self, y: Tensor, x: Tensor, layer: int, site: Site) -> None:
        """See StepKernels."""
        place = layer * len(Site) + site
        for request in self._batch.requests:
            if request.adapter is None:
                continue
            starts = request.adapter.starts
            for record in request.adapter.records[starts[place] : starts[place + 1]]:
                rows = range(request.start, request.start + request.count)
                if record[Field.FORMAT] == AFFINE:
                    out, scale, shift = read_affine(self._arena.memory, record)
                    for row in rows:
                        y[row, out] = (scale * y[row, out].float() + shift).to(y.dtype)
                    continue
                a, b = read_tile(self._arena.memory, record)
                out = slice(int(record[Field.OUT]), int(record[Field.OUT] + record[Field.OUTER]))
                for row in rows:
                    y[row, out] = (y[row, out].float() + (a @ x[row].float()) @ b).to(y.dtype)


def _weight_of(linear: Linear) -> Tensor:
    weight = linear.weight.float()
    return weight if linear.scales is None else weight * linear.scales[:, None]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Weight · x / sqrt(mean(x²) + eps) over the last dimension, in x's dtype. weight [D], or [heads, D]."""
    wide = x.float()
    mean_square = wide.pow(2).mean(dim=-1, keepdim=True)
    return (weight.float() * (wide / torch.sqrt(mean_square + eps))).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate dimension pairs (i, i + D/2), in x's dtype. x [T, heads, D]; cos, sin [T, 1, D/2] float32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) · up of gate_up [T, 2 · inner], [T, inner]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)


def _attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One row's attention: q [Hq, D]; keys, values [Hk, length, D]; returns [Hq, D]."""
    heads, dim = q.shape
    per_kv_head = heads // keys.shape[0]
    out = torch.empty_like(q)
    for head in range(heads):
        seen_keys, seen_values = keys[head // per_kv_head], values[head // per_kv_head]
        out[head] = torch.softmax(seen_keys @ q[head] / dim**0.5, dim=0) @ seen_values
    return out
