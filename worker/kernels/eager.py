"""The kernels in batched torch operators: the backend for every device until one has kernels of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from worker.kernels.layout import AttentionPlan, Chunk, DecodeGroup, KvCache, LoraGroup, Site


class EagerKernels:
    """`Kernels` without a loop over rows: decodes are grouped by length, chunks and adapters taken one by one.

    One engine thread at a time may use an instance: it keeps the room for gathered keys and values from layer to layer,
    since fresh memory costs as much as the gathering (every page of it must be mapped first).
    """

    def __init__(self) -> None:
        self._gathered_keys: Tensor | None = None
        self._gathered_values: Tensor | None = None

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Kernels."""
        if weight.dim() == 1:
            return functional.rms_norm(x, weight.shape, weight, eps)
        return functional.rms_norm(x, weight.shape[-1:], None, eps) * weight

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See Kernels."""
        half = x.shape[-1] // 2
        wide = x.float()
        first, second = wide[..., :half], wide[..., half:]
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
        return out.to(x.dtype)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, cache: KvCache, layer: int, plan: AttentionPlan) -> Tensor:
        """See Kernels."""
        # A broken adapter may overflow; its keys must not reach others as NaN through masked positions.
        k, v = torch.nan_to_num(k), torch.nan_to_num(v)
        keys, values = cache.keys[layer], cache.values[layer]
        keys.flatten(1, 2).index_copy_(1, plan.slots, k.transpose(0, 1))
        values.flatten(1, 2).index_copy_(1, plan.slots, v.transpose(0, 1))
        out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
        for chunk in plan.chunks:
            out[chunk.start : chunk.end] = _attend_chunk(q, k, v, keys, values, chunk)
        for group in plan.decodes:
            seen_keys = self._gathered_keys = _gather(keys, group.blocks, self._gathered_keys)
            seen_values = self._gathered_values = _gather(values, group.blocks, self._gathered_values)
            out.index_copy_(0, group.rows, _attend_decodes(q, seen_keys, seen_values, group))
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See Kernels."""
        inner = gate_up.shape[-1] // 2
        return functional.silu(gate_up[..., :inner]).mul_(gate_up[..., inner:])

    def lora_add(self, y: Tensor, x: Tensor, groups: Sequence[LoraGroup], layer: int, site: Site) -> None:
        """See Kernels."""
        for group in groups:
            factors = group.layers[layer][site]
            if factors is None:
                continue
            h = torch.mm(x[group.start : group.end], factors.shrink_t)
            rows = y[group.start : group.end]
            for expand in factors.expands:
                rows[:, expand.out].addmm_(h[:, expand.rank], expand.factor_t, alpha=expand.scale)


def _attend_chunk(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, chunk: Chunk) -> Tensor:
    """Attention of a chunk's rows to all of its request's positions so far; returns [rows, Hq · D]."""
    rows = slice(chunk.start, chunk.end)
    queries = q[rows].transpose(0, 1)
    if chunk.visible is None:
        seen_keys, seen_values = k[rows].transpose(0, 1), v[rows].transpose(0, 1)
    else:
        length = chunk.position + chunk.end - chunk.start
        seen_keys = keys.index_select(1, chunk.blocks).flatten(1, 2)[:, :length]
        seen_values = values.index_select(1, chunk.blocks).flatten(1, 2)[:, :length]
    attended = functional.scaled_dot_product_attention(
        queries[None],
        seen_keys[None],
        seen_values[None],
        attn_mask=chunk.visible,
        is_causal=chunk.visible is None,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return attended[0].transpose(0, 1).flatten(1)


def _gather(source: Tensor, blocks: Tensor, room: Tensor | None) -> Tensor:
    """Copy n blocks of source [Hk, blocks, block_tokens, D] to [Hk, n, block_tokens, D], into `room` if that fits."""
    shape = (source.shape[0], len(blocks), *source.shape[2:])
    if room is None or room.shape != shape:
        return source.index_select(1, blocks)
    return torch.index_select(source, 1, blocks, out=room)


def _attend_decodes(q: Tensor, keys: Tensor, values: Tensor, group: DecodeGroup) -> Tensor:
    """Attention of one row per request to its gathered blocks, scores in float32; returns [b, Hq · D].

    keys, values [Hk, b · n, block_tokens, D].
    """
    batch, kv_heads, dim = len(group.rows), keys.shape[0], keys.shape[-1]
    per_kv_head = q.shape[1] // kv_heads
    # Head-major throughout, so that the gathered blocks are the operands of the products as they lie.
    queries = q.index_select(0, group.rows).float().view(batch, kv_heads, per_kv_head, dim)
    queries = queries.transpose(0, 1).reshape(kv_heads * batch, per_kv_head, dim) * dim**-0.5
    scores = torch.bmm(queries, keys.float().view(kv_heads * batch, -1, dim).transpose(1, 2))
    scores.view(kv_heads, batch, per_kv_head, -1).masked_fill_(group.beyond, -torch.inf)
    weights = scores.softmax(dim=-1)
    attended = torch.bmm(weights, values.float().view(kv_heads * batch, -1, dim))
    return attended.view(kv_heads, batch, per_kv_head, dim).transpose(0, 1).reshape(batch, -1).to(q.dtype)
