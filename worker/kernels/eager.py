"""The kernels in batched torch operators: for GPUs, and models, that the Triton kernels do not compute."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from worker.kernels.layout import BLOCK_TOKENS, Arena, Batch, Rows, Site
from worker.kernels.linear import Linear
from worker.kernels.tiles import AFFINE, Field, PlacedAdapter, read_affine, read_tile


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Requests with a single row, computed together over as many blocks as the longest has."""

    rows: Tensor
    blocks: Tensor
    """[b, n]; rows with fewer blocks are filled up with block 0."""
    seen: Tensor
    """[b, 1, 1, n · BLOCK_TOKENS] bool."""


class EagerBackend:
    """`Backend` of the kernels in torch operators."""

    def pack(self, linear: Linear) -> Linear:
        """See Backend."""
        if linear.scales is not None:
            raise ValueError("weights in whole numbers are for the CPU's kernels")
        return linear

    def bind(self, arena: Arena, cos: Tensor, sin: Tensor) -> EagerKernels:
        """See Backend."""
        return EagerKernels(arena, cos, sin)


class EagerKernels:
    """`Kernels`: a new `StepKernels` per step."""

    def __init__(self, arena: Arena, cos: Tensor, sin: Tensor) -> None:
        """cos, sin [positions, D/2] float32 on the arena's device."""
        self._arena, self._cos, self._sin = arena, cos, sin

    def step(self, batch: Batch) -> EagerStep:
        """See Kernels."""
        positions = torch.from_numpy(batch.positions).to(self._cos.device)
        return EagerStep(self._arena, batch, self._cos[positions, None], self._sin[positions, None])


class EagerStep:
    """`StepKernels` over one batch."""

    def __init__(self, arena: Arena, batch: Batch, cos: Tensor, sin: Tensor) -> None:
        """cos, sin [T, 1, D/2] float32."""
        self._arena, self._cos, self._sin = arena, cos, sin
        device = cos.device
        slots = torch.from_numpy(batch.slots).to(device)
        self._blocks, self._offsets = slots // BLOCK_TOKENS, slots % BLOCK_TOKENS
        self._chunks = [request for request in batch.requests if request.count > 1]
        singles = [request for request in batch.requests if request.count == 1]
        self._decodes = _decodes(singles, device) if singles else None
        self._lora = _spans(batch)

    def embed(self, embedding: Linear, token_ids: Tensor) -> Tensor:
        """See StepKernels."""
        return functional.embedding(token_ids, embedding.weight)

    def linear(self, linear: Linear, x: Tensor) -> Tensor:
        """See StepKernels."""
        return functional.linear(x, linear.weight.to(x.dtype), linear.bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See StepKernels."""
        if weight.dim() == 1:
            return functional.rms_norm(x, weight.shape, weight, eps)
        return functional.rms_norm(x, weight.shape[-1:], None, eps) * weight

    def add_rms_norm(self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See StepKernels."""
        residual.add_(delta)
        return self.rms_norm(residual, weight, eps)

    def add(self, residual: Tensor, delta: Tensor) -> None:
        """See StepKernels."""
        residual.add_(delta)

    def attention(self, qkv: Tensor, layer: int, qk_norm: Tensor | None, eps: float) -> Tensor:
        """See StepKernels."""
        shape, kv = self._arena.shape, self._arena.kv[:, layer]
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        q_k_v = qkv.view(len(qkv), -1, shape.head_dim)
        q_k, v = q_k_v[:, : heads + kv_heads], q_k_v[:, heads + kv_heads :]
        if qk_norm is not None:
            q_k = self.rms_norm(q_k, qk_norm, eps)
        q_k = self._rotate(q_k)
        q, k = q_k[:, :heads], q_k[:, heads:]
        kv[self._blocks, 0, :, self._offsets] = k.to(kv.dtype)
        kv[self._blocks, 1, :, self._offsets] = v.to(kv.dtype)
        out = torch.empty(len(qkv), heads, shape.head_dim, dtype=qkv.dtype, device=qkv.device)
        for chunk in self._chunks:
            rows = slice(chunk.start, chunk.start + chunk.count)
            length = chunk.position + chunk.count
            blocks = kv[torch.tensor(chunk.block_ids, device=kv.device)]
            seen = torch.ones(chunk.count, length, dtype=torch.bool, device=kv.device).tril_(chunk.position)
            out[rows] = _attend(q[rows][None], blocks[None], seen[None, None], length)[0]
        if self._decodes is not None:
            decodes = self._decodes
            length = decodes.seen.shape[-1]
            out[decodes.rows] = _attend(q[decodes.rows][:, None], kv[decodes.blocks], decodes.seen, length)[:, 0]
        return out.flatten(1)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See StepKernels."""
        inner = gate_up.shape[-1] // 2
        return functional.silu(gate_up[..., :inner]).mul_(gate_up[..., inner:])

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """See StepKernels."""
        return logits.amax(dim=-1).float(), logits.argmax(dim=-1)

    def finish(self) -> None:
        """See StepKernels."""

    def lora_add(self, y: Tensor, x: Tensor, layer: int, site: Site) -> None:
        """See StepKernels."""
        place = layer * len(Site) + site
        for start, end, adapter in self._lora:
            for record in adapter.records[adapter.starts[place] : adapter.starts[place + 1]]:
                if record[Field.FORMAT] == AFFINE:
                    out, scale, shift = read_affine(self._arena.memory, record)
                    y[start:end, out] = (y[start:end, out] * scale + shift).to(y.dtype)  # in float32
                    continue
                a, b = (factor.to(y.dtype) for factor in read_tile(self._arena.memory, record))
                out = slice(int(record[Field.OUT]), int(record[Field.OUT] + record[Field.OUTER]))
                y[start:end, out].addmm_(x[start:end] @ a.T, b)

    def _rotate(self, x: Tensor) -> Tensor:
        first, second = x.float().chunk(2, dim=-1)
        cos, sin = self._cos, self._sin
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _decodes(singles: list[Rows], device: torch.device) -> _Decodes:
    width = max(len(request.block_ids) for request in singles)
    blocks = np.zeros((len(singles), width), dtype=np.int64)
    for index, request in enumerate(singles):
        blocks[index, : len(request.block_ids)] = request.block_ids
    positions = np.array([request.position for request in singles])
    seen = np.arange(width * BLOCK_TOKENS) <= positions[:, None, None, None]
    rows = np.array([request.start for request in singles])
    return _Decodes(*(torch.from_numpy(array).to(device) for array in (rows, blocks, seen)))


def _spans(batch: Batch) -> list[tuple[int, int, PlacedAdapter]]:
    """Return (first row, end, adapter) of neighbouring requests that share an adapter."""
    spans: list[tuple[int, int, PlacedAdapter]] = []
    for request in batch.requests:
        if request.adapter is None:
            continue
        end = request.start + request.count
        if spans and spans[-1][2] is request.adapter and spans[-1][1] == request.start:
            spans[-1] = (spans[-1][0], end, request.adapter)
        else:
            spans.append((request.start, end, request.adapter))
    return spans


def _attend(q: Tensor, blocks: Tensor, seen: Tensor, length: int) -> Tensor:
    """Q [b, rows, Hq, D], blocks [b, n, 2, Hk, BLOCK_TOKENS, D], seen [b, 1, rows, length] -> [b, rows, Hq, D]."""
    keys, values = blocks.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[..., :length, :].to(q.dtype)  # [b, Hk, length, D]
    values = values.nan_to_num()  # a weight of 0 does not silence what an earlier owner of the block left
    attended = functional.scaled_dot_product_attention(
        q.transpose(1, 2), keys.nan_to_num(), values, attn_mask=seen, enable_gqa=q.shape[2] != keys.shape[1]
    )
    return attended.transpose(1, 2)
