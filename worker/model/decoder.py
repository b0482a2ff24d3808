"""The decoder: one forward pass over the flattened tokens of a step.

Owns the order of operations of the Llama family (pre-norm, grouped-query attention with rotary positions, gated MLP)
and nothing else: tensors come from `weights`, the step's layout from `batch`, small operators from a `Kernels` backend.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from worker.kernels.interface import Kernels
from worker.kernels.layout import AttentionPlan, KvCache, LoraGroup, Site
from worker.model.config import ModelConfig
from worker.model.weights import LayerWeights, ModelWeights


@dataclass(frozen=True, slots=True)
class Rows:
    """What the decoder computes in a step: T tokens with their positions, attention and adapters."""

    token_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64."""
    attention: AttentionPlan
    lora: tuple[LoraGroup, ...]


class Decoder:
    """A base model ready to run; holds no state of requests."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, kernels: Kernels, max_context_tokens: int) -> None:
        self._config, self._weights, self._kernels = config, weights, kernels
        cos, sin = config.rope.tables(max_context_tokens)
        self._cos, self._sin = cos.to(weights.norm.device), sin.to(weights.norm.device)

    def hidden(self, rows: Rows, cache: KvCache) -> Tensor:
        """Run all layers, writing the rows' keys and values to the cache; returns [T, hidden] before the last norm."""
        cos, sin = self._cos[rows.positions], self._sin[rows.positions]
        residual = functional.embedding(rows.token_ids, self._weights.embedding)
        for index, layer in enumerate(self._weights.layers):
            self._attention(residual, layer, index, rows, cache, cos, sin)
            self._mlp(residual, layer, index, rows)
        return residual

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the next token's logits of some of `hidden`'s rows, [S, vocab] float32."""
        normed = self._kernels.rms_norm(hidden, self._weights.norm, self._config.rms_norm_eps)
        return self._weights.lm_head(normed).float()

    def _attention(
        self, residual: Tensor, layer: LayerWeights, index: int, rows: Rows, cache: KvCache, cos: Tensor, sin: Tensor
    ) -> None:
        config, kernels = self._config, self._kernels
        x = kernels.rms_norm(residual, layer.input_norm, config.rms_norm_eps)
        qkv = layer.qkv(x)
        kernels.lora_add(qkv, x, rows.lora, index, Site.QKV)
        heads = qkv.view(len(x), -1, config.head_dim)
        rotated = config.num_heads + config.num_kv_heads
        qk = heads[:, :rotated]
        if layer.qk_norm is not None:
            qk = kernels.rms_norm(qk, layer.qk_norm, config.rms_norm_eps)
        qk = kernels.rotate(qk, cos, sin)
        q, k, v = qk[:, : config.num_heads], qk[:, config.num_heads :], heads[:, rotated:]
        attended = kernels.attention(q, k, v, cache, index, rows.attention)
        out = layer.o(attended)
        kernels.lora_add(out, attended, rows.lora, index, Site.O)
        residual.add_(out)

    def _mlp(self, residual: Tensor, layer: LayerWeights, index: int, rows: Rows) -> None:
        kernels = self._kernels
        x = kernels.rms_norm(residual, layer.post_attention_norm, self._config.rms_norm_eps)
        gate_up = layer.gate_up(x)
        kernels.lora_add(gate_up, x, rows.lora, index, Site.GATE_UP)
        inner = kernels.silu_mul(gate_up)
        out = layer.down(inner)
        kernels.lora_add(out, inner, rows.lora, index, Site.DOWN)
        residual.add_(out)


def allocate_cache(
    config: ModelConfig, *, num_blocks: int, block_tokens: int, device: torch.device, dtype: torch.dtype
) -> KvCache:
    """Return an empty cache, all zeros; on a CPU it takes memory only as it is written."""
    shape = (config.num_layers, config.num_kv_heads, num_blocks, block_tokens, config.head_dim)

    def zeros() -> Tensor:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        # torch would write the zeros; the system has pages of them that cost nothing until they are used
        untouched = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
        return torch.from_numpy(untouched).view(dtype).view(shape)

    return KvCache(zeros(), zeros())
