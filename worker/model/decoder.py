"""The decoder: one forward pass over the flattened tokens of a step.

Owns the order of operations of the Llama family (pre-norm, grouped-query attention with rotary positions, gated MLP)
and nothing else: tensors come from `weights`, the step's layout from `batch`, operators from a `Kernels` backend.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from worker.kernels.interface import Kernels, StepKernels
from worker.kernels.layout import Batch, Site
from worker.model.config import ModelConfig
from worker.model.device import send
from worker.model.weights import LayerWeights, ModelWeights


class Decoder:
    """A base model ready to run; holds no state of requests."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, kernels: Kernels) -> None:
        self._eps = config.rms_norm_eps
        self._weights, self._kernels = weights, kernels

    def logits(self, batch: Batch, rows: NDArray[np.int64]) -> Tensor:
        """Run the model over a batch, writing keys and values to the cache.

        Returns the next token's logits of some of the batch's rows, [len(rows), vocab] float32.
        """
        step = self._kernels.step(batch)
        hidden = self._hidden(step, send(batch.token_ids, self._weights.embedding.device))
        if not len(rows):
            step.finish()
            return torch.empty(0, self._weights.lm_head.out_features)
        if not np.array_equal(rows, np.arange(len(hidden))):  # some rows only, or in another order
            step.finish()
            hidden = hidden[send(rows, hidden.device)]
        return self._head(step, hidden).float()

    def forward(self, step: StepKernels, token_ids: Tensor) -> Tensor:
        """Run the model over one step's operators; token ids [T] int64 to every row's logits [T, vocab].

        Reads nothing on the host, so that it can be captured.
        """
        return self._head(step, self._hidden(step, token_ids))

    def _head(self, step: StepKernels, hidden: Tensor) -> Tensor:
        logits = step.linear(self._weights.lm_head, step.rms_norm(hidden, self._weights.norm, self._eps))
        step.finish()
        return logits

    def _hidden(self, step: StepKernels, token_ids: Tensor) -> Tensor:
        """Run all layers; returns [T, hidden] before the last norm."""
        layers, embedding = self._weights.layers, self._weights.embedding
        residual = functional.embedding(token_ids, embedding).to(self._weights.norm.dtype)
        x = step.rms_norm(residual, layers[0].input_norm, self._eps)
        for index, layer in enumerate(layers):
            delta = self._attention(step, x, layer, index)
            x = step.add_rms_norm(residual, delta, layer.post_attention_norm, self._eps)
            delta = self._mlp(step, x, layer, index)
            if index + 1 < len(layers):
                x = step.add_rms_norm(residual, delta, layers[index + 1].input_norm, self._eps)
        step.add(residual, delta)
        return residual

    def _attention(self, step: StepKernels, x: Tensor, layer: LayerWeights, index: int) -> Tensor:
        qkv = step.linear(layer.qkv, x)
        step.lora_add(qkv, x, index, Site.QKV)
        attended = step.attention(qkv, index, layer.qk_norm, self._eps)
        out = step.linear(layer.o, attended)
        step.lora_add(out, attended, index, Site.O)
        return out

    def _mlp(self, step: StepKernels, x: Tensor, layer: LayerWeights, index: int) -> Tensor:
        gate_up = step.linear(layer.gate_up, x)
        step.lora_add(gate_up, x, index, Site.GATE_UP)
        inner = step.silu_mul(gate_up)
        out = step.linear(layer.down, inner)
        step.lora_add(out, inner, index, Site.DOWN)
        return out
