"""The decoder: one forward pass over the flattened tokens of a step.

Owns the order of operations of the Llama family (pre-norm, grouped-query attention with rotary positions, gated MLP)
and nothing else: tensors come from `weights`, the step's layout from `batch`, operators from a `Kernels` backend.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from worker.kernels.interface import Kernels, Replaying, StepKernels
from worker.kernels.layout import Batch, Site
from worker.model.config import ModelConfig
from worker.model.device import send
from worker.model.scores import Scores
from worker.model.vocabulary import VocabularyStep
from worker.model.weights import LayerWeights, ModelWeights


class Decoder:
    """A base model ready to run; holds no state of requests."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, kernels: Kernels) -> None:
        self._eps = config.rms_norm_eps
        self._weights, self._kernels = weights, kernels

    def scores(self, batch: Batch, rows: NDArray[np.int64]) -> Scores | None:
        """Run the model over a batch, writing keys and values to the cache.

        Returns the next token's scores for some of the batch's rows, None for none. They last until the next step.
        """
        step, device = self._kernels.step(batch), self._weights.norm.device
        token_ids = send(batch.token_ids, device)
        if batch.pending is not None:
            batch.pending.fill(token_ids)
        every = np.array_equal(rows, np.arange(len(batch.token_ids)))
        changes = VocabularyStep(step, batch) if batch.changes_vocabulary else None
        replaying = step if every and changes is None and isinstance(step, Replaying) else None
        if replaying is not None and (known := replaying.replay(token_ids)) is not None:
            return Scores(*known)
        hidden = self._hidden(step, token_ids, changes)
        if not len(rows):
            step.finish()
            return None
        if not every:
            step.finish()
            hidden = hidden[send(rows, device)]
        logits = self._head(step, hidden) if changes is None else self._changed_head(step, hidden, changes, rows)
        largest = step.largest(logits)
        step.finish()
        scores = Scores(logits.float(), *largest)
        if replaying is not None:
            replaying.remember(scores.logits, scores.largest, scores.likeliest)
        return scores

    def forward(self, step: StepKernels, token_ids: Tensor) -> Tensor:
        """Run the model over one step's operators; token ids [T] int64 to every row's logits [T, vocab].

        Reads nothing on the host, so that it can be captured.
        """
        logits = self._head(step, self._hidden(step, token_ids))
        step.finish()
        return logits

    def _head(self, step: StepKernels, hidden: Tensor) -> Tensor:
        return step.linear(self._weights.lm_head, step.rms_norm(hidden, self._weights.norm, self._eps))

    def _changed_head(
        self, step: StepKernels, hidden: Tensor, changes: VocabularyStep, rows: NDArray[np.int64]
    ) -> Tensor:
        return changes.logits(self._weights.lm_head, step.rms_norm(hidden, self._weights.norm, self._eps), rows)

    def _hidden(self, step: StepKernels, token_ids: Tensor, changes: VocabularyStep | None = None) -> Tensor:
        """Run all layers; returns [T, hidden] before the last norm."""
        layers = self._weights.layers
        residual = step.embed(self._weights.embedding, token_ids).to(self._weights.norm.dtype)
        if changes is not None:
            changes.embed(residual, token_ids)
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
