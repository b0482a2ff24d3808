"""A base model's weights, from safetensors files to the fused tensors the decoder multiplies by.

Owns: which tensors a model of a given config has, their names and shapes, and their fusing (q, k, v; gate, up). Reads
through memory maps, one layer at a time. A tensor that is missing, misshapen or unaccounted for is refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.merging.changes import Change, Changes, row_blocks
from loraplex.errors import CorruptArtifact, InvalidBaseModel
from loraplex.manifest import weight_files
from worker.kernels.linear import Linear
from worker.model.config import ModelConfig

_UNREAD: Final = re.compile(r"\.rotary_emb\.inv_freq$")  # computed from the config; old checkpoints store it as well
_EMBEDDING: Final = "model.embed_tokens.weight"
_MERGED_VALUES: Final = 2**22
_FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer."""

    input_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None
    """[num_heads + num_kv_heads, head_dim]: the query norm for each query head, then the key norm for each key head."""
    o: Linear
    post_attention_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All of a base model; `lm_head` is `embedding`, its weight [vocab, hidden], where they are tied."""

    embedding: Linear
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: Linear


def load_weights(
    folder: Path,
    config: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    pack: Callable[[Linear], Linear] = lambda linear: linear,
    merge: Changes | None = None,
) -> ModelWeights:
    """Load `folder`'s safetensors onto `device`, to compute in `dtype`, every matrix as `pack` returns it.

    On a CPU matrices stored in bfloat16 stay so, as its kernels widen them without loss, and activations and norms are
    float32 whatever `dtype` says. What `merge` changes is computed in float32 and kept in `dtype`; `config` is then the
    merged one. Raises InvalidBaseModel or CorruptArtifact, naming the tensor or the file.
    """
    with ExitStack() as stack:
        reader = _Reader(folder, stack, device, dtype, pack, {} if merge is None else merge.tensors)
        for name in () if merge is None else merge.dropped:
            reader.ignore(name)
        outer = (config.vocab_size, config.hidden_size)
        embedding = pack(Linear.plain(reader.matrix(_EMBEDDING, outer), None))
        layers = tuple(_load_layer(reader, config, index) for index in range(config.num_layers))
        norm = reader.take("model.norm.weight", (config.hidden_size,))
        if config.tied_embeddings:
            reader.ignore("lm_head.weight")  # some checkpoints store the tied matrix twice
            lm_head = embedding
        else:
            lm_head = pack(Linear.plain(reader.matrix("lm_head.weight", outer), None))
        reader.refuse_leftovers()
    return ModelWeights(embedding, layers, norm, lm_head)


def stores_bfloat16(folder: Path) -> bool:
    """Whether a base's embedding, and so most likely all of it, is stored in bfloat16. Raises CorruptArtifact."""
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as handle:
                if _EMBEDDING in handle.keys():  # noqa: SIM118 - not a mapping
                    return bool(handle.get_slice(_EMBEDDING).get_dtype() == "BF16")
        except (SafetensorError, OSError) as error:
            raise CorruptArtifact(f"{file} is not a readable safetensors file: {error}", file=file.name) from error
    return False  # loading will tell that it is missing


def _load_layer(reader: _Reader, config: ModelConfig, index: int) -> LayerWeights:
    prefix = f"model.layers.{index}."
    hidden, shapes = config.hidden_size, config.module_shapes()

    def fuse(modules: tuple[str, ...], biased: bool) -> Linear:
        weights = [reader.matrix(f"{prefix}{m}.weight", (shapes[m][1], shapes[m][0])) for m in modules]
        biases = [reader.take(f"{prefix}{m}.bias", (shapes[m][1],)) for m in modules] if biased else []
        if len({weight.dtype for weight in weights}) > 1:  # a checkpoint may store some of them wider
            weights = [weight.float() for weight in weights]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        return reader.pack(Linear.plain(weight, torch.cat(biases) if biased else None))

    qkv = fuse(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), config.qkv_bias)
    o = fuse(("self_attn.o_proj",), config.o_bias)
    gate_up = fuse(("mlp.gate_proj", "mlp.up_proj"), config.mlp_bias)
    down = fuse(("mlp.down_proj",), config.mlp_bias)
    qk_norm = None
    if config.qk_norm:
        q_norm = reader.take(f"{prefix}self_attn.q_norm.weight", (config.head_dim,))
        k_norm = reader.take(f"{prefix}self_attn.k_norm.weight", (config.head_dim,))
        qk_norm = torch.stack([q_norm] * config.num_heads + [k_norm] * config.num_kv_heads)
    return LayerWeights(
        input_norm=reader.take(f"{prefix}input_layernorm.weight", (hidden,)),
        qkv=qkv,
        qk_norm=qk_norm,
        o=o,
        post_attention_norm=reader.take(f"{prefix}post_attention_layernorm.weight", (hidden,)),
        gate_up=gate_up,
        down=down,
    )


class _Reader:
    """Tensors of a folder's files by name, each taken once."""

    def __init__(
        self,
        folder: Path,
        stack: ExitStack,
        device: torch.device,
        dtype: torch.dtype,
        pack: Callable[[Linear], Linear],
        changes: Mapping[str, Change],
    ) -> None:
        self._folder, self._device, self.dtype, self.pack = folder, device, dtype, pack
        self._changes = changes
        self._activations = torch.float32 if device.type == "cpu" else dtype
        self._handles: dict[str, Any] = {}
        for file in weight_files(folder):
            try:
                handle = stack.enter_context(safe_open(file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise CorruptArtifact(f"{file} is not a readable safetensors file: {error}", file=file.name) from error
            self._handles.update((name, handle) for name in handle.keys())  # noqa: SIM118 - not a mapping
        self._sources = dict(self._handles)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a copy of the tensor on the device; raises InvalidBaseModel if it is not there in this shape."""
        return self._load(name, shape).to(device=self._device, dtype=self._activations, copy=True)

    def matrix(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a copy of a matrix to multiply by, in the dtype it is best read in; raises as `take` does."""
        loaded, dtype = self._load(name, shape), self.dtype
        if self._device.type == "cpu" and loaded.dtype == torch.bfloat16:
            dtype = torch.bfloat16
        return loaded.to(device=self._device, dtype=dtype, copy=True)

    def _load(self, name: str, shape: tuple[int, ...]) -> Tensor:
        change = self._changes.get(name)
        self._handles.pop(name, None)
        return self._stored(name, shape) if change is None else self._merged(change, shape)

    def _merged(self, change: Change, shape: tuple[int, ...]) -> Tensor:
        base = None if change.source is None else self._stored(change.source, shape)
        merged = torch.empty(shape)
        rows = merged.numpy()
        for start, stop in row_blocks(shape[0], math.prod(shape[1:]), _MERGED_VALUES):
            before = torch.zeros(stop - start, *shape[1:]) if base is None else base[start:stop].float()
            rows[start:stop] = change.rows(before.numpy(), start)
        return merged

    def _stored(self, name: str, shape: tuple[int, ...]) -> Tensor:
        handle = self._sources.get(name)
        if handle is None:
            raise InvalidBaseModel(
                f"{self._folder}: tensor {name} is missing; config.json asks for it in shape {list(shape)}",
                field="base",
                tensor=name,
            )
        view = handle.get_slice(name)
        stored, kind = tuple(view.get_shape()), view.get_dtype()
        if stored != shape or kind not in _FLOATS:
            raise InvalidBaseModel(
                f"{self._folder}: tensor {name} is {kind} {list(stored)}, config.json asks for floats {list(shape)}",
                field="base",
                tensor=name,
            )
        loaded: Tensor = handle.get_tensor(name)  # may be a view of the mapped file
        return loaded

    def ignore(self, name: str) -> None:
        """Leave the tensor unread if it is there."""
        self._handles.pop(name, None)

    def refuse_leftovers(self) -> None:
        """Raise InvalidBaseModel if a tensor was not taken: the model computes something we would not."""
        left = sorted(name for name in self._handles if not _UNREAD.search(name))
        if left:
            raise InvalidBaseModel(
                f"{self._folder}: tensor {left[0]} has no place in a model with this config.json"
                + (f" (nor have {len(left) - 1} others)" if len(left) > 1 else ""),
                field="base",
                tensor=left[0],
            )
