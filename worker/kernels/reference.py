"""The oracle: every kernel in plain float32 torch, written for reading, one row or head at a time. Slow on purpose."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.kernels.layout import AttentionPlan, KvCache, LoraGroup, Site


class ReferenceKernels:
    """`Kernels` by their formulas."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Kernels."""
        wide = x.float()
        mean_square = wide.pow(2).mean(dim=-1, keepdim=True)
        return (weight.float() * (wide / torch.sqrt(mean_square + eps))).to(x.dtype)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See Kernels."""
        half = x.shape[-1] // 2
        first, second = x[..., :half].float(), x[..., half:].float()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, cache: KvCache, layer: int, plan: AttentionPlan) -> Tensor:
        """See Kernels."""
        keys, values = cache.keys[layer], cache.values[layer]
        for row, slot in enumerate(plan.slots.tolist()):
            block, offset = divmod(slot, cache.block_tokens)
            keys[:, block, offset] = torch.nan_to_num(k[row])
            values[:, block, offset] = torch.nan_to_num(v[row])
        out = torch.empty_like(q)
        for chunk in plan.chunks:
            for row in range(chunk.start, chunk.end):
                length = chunk.position + row - chunk.start + 1
                out[row] = _attend(q[row], keys, values, chunk.blocks, length)
        for group in plan.decodes:
            tables = group.blocks.view(len(group.rows), -1)
            for row, blocks, length in zip(group.rows.tolist(), tables, group.lengths.tolist(), strict=True):
                out[row] = _attend(q[row], keys, values, blocks, length)
        return out.flatten(1)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See Kernels."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)

    def lora_add(self, y: Tensor, x: Tensor, groups: Sequence[LoraGroup], layer: int, site: Site) -> None:
        """See Kernels."""
        for group in groups:
            factors = group.layers[layer][site]
            if factors is None:
                continue
            for row in range(group.start, group.end):
                h = x[row].float() @ factors.shrink_t.float()
                for expand in factors.expands:
                    delta = expand.scale * (h[expand.rank] @ expand.factor_t.float())
                    y[row, expand.out] = (y[row, expand.out].float() + delta).to(y.dtype)


def _attend(q: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, length: int) -> Tensor:
    """One row's attention: q [Hq, D]; keys, values [Hk, blocks, block_tokens, D]; returns [Hq, D]."""
    heads, dim = q.shape
    per_kv_head = heads // keys.shape[0]
    out = torch.empty_like(q)
    for head in range(heads):
        kv_head = head // per_kv_head
        seen_keys = keys[kv_head, blocks].reshape(-1, dim)[:length].float()
        seen_values = values[kv_head, blocks].reshape(-1, dim)[:length].float()
        scores = seen_keys @ q[head].float() / dim**0.5
        out[head] = (torch.softmax(scores, dim=0) @ seen_values).to(q.dtype)
    return out
