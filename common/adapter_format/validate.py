"""From an uploaded PEFT folder to an adapter that is known to fit its base, or a refusal that names the tensor.

Every tensor of the file must be a LoRA factor of a linear of the base, in the shape, rank and dtype that config and
base ask for; every module that the config targets must have its pair; values must be finite and do something.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from common.adapter_format.base import KINDS, BaseLinears, layer_of
from common.adapter_format.config import LoraConfig, parse_config
from common.adapter_format.packed import FORMAT_NONE, PackedAdapter, PackedModule, version_digest
from common.adapter_format.tensor_file import NUMPY_DTYPES, StoredTensor, open_tensors
from loraplex.errors import AdapterMismatch, CorruptArtifact, InvalidAdapter, UnsupportedAdapter
from loraplex.peft_folder import WEIGHTS_FILE

__all__ = ["WEIGHTS_FILE", "validate"]

# base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight, with or without the adapter's name before .weight.
_FACTOR: Final = re.compile(
    r"(?:base_model\.model\.)?(?:model\.)?(layers\.(?:0|[1-9]\d{0,5})\.\w+\.\w+)\.lora_(A|B)(?:\.(\w+))?\.weight"
)
# What else PEFT writes, and the config field that asked for it.
_OTHER_TENSORS: Final = (
    (re.compile(r".*\.lora_magnitude_vector(\..*)?"), "use_dora", "DoRA"),
    (re.compile(r".*\.lora_[AB](\.\w+)?\.bias"), "lora_bias", "a LoRA bias"),
    (re.compile(r".*\.lora_embedding_[AB](\..*)?"), "target_modules", "LoRA on the token embedding"),
    (re.compile(r"(.*\.)?lm_head\..*"), "target_modules", "LoRA or trained weights on the output head"),
    (re.compile(r"(.*\.)?(modules_to_save|embed_tokens)\..*"), "modules_to_save", "fully trained modules"),
    (re.compile(r".*\.(trainable_tokens_.*|token_adapter\..*)"), "trainable_token_indices", "trained tokens"),
    (re.compile(r"(?!.*\.lora_).*\.bias"), "bias", "trained biases"),
)
# Modules outside the layers that a config may target, and that are not served.
_OUTSIDE: Final = ("model.embed_tokens", "lm_head")

_Factors = dict[str, dict[str, StoredTensor]]


def validate(config_raw: bytes, weights: Path, base: BaseLinears) -> PackedAdapter:
    """Check the bytes of adapter_config.json and the safetensors file against the base.

    The arrays of the result are views of the mapped file. Raises InvalidAdapter or one of its kinds
    (UnsupportedAdapter, AdapterMismatch, CorruptArtifact); metadata `field` or `tensor` names what is at fault.
    """
    config = parse_config(config_raw)
    for outside in _OUTSIDE:
        if config.targets_module(outside, None):
            raise UnsupportedAdapter(
                f"target_modules includes {outside}; LoRA on embeddings and output heads cannot be served",
                field="target_modules",
            )
    factors = _by_module(open_tensors(weights).tensors, base)
    _check_coverage(config, factors, base)
    modules = tuple(_module(name, pair, config, base) for name, pair in sorted(factors.items()))
    if not any(module.a.any() and module.b.any() for module in modules):
        raise InvalidAdapter(
            f"{WEIGHTS_FILE}: the adapter changes nothing, as in every module lora_A or lora_B is zero; was it saved "
            "before training?",
            field=WEIGHTS_FILE,
        )
    return PackedAdapter(version_digest(base.base_digest, modules), base.base_digest, FORMAT_NONE, modules)


def _by_module(tensors: Mapping[str, StoredTensor], base: BaseLinears) -> _Factors:
    """Sort the file's tensors into {module: {"A": ..., "B": ...}}; refuse any that is not a factor of a linear."""
    if not tensors:
        raise InvalidAdapter(f"{WEIGHTS_FILE} holds no tensors", field=WEIGHTS_FILE)
    factors: _Factors = {}
    adapter_names = set()
    for name, tensor in tensors.items():
        match = _FACTOR.fullmatch(name)
        if match is None:
            raise _not_a_factor(name)
        module, factor, adapter_name = match[1], match[2], match[3]
        adapter_names.add(adapter_name)
        if module not in base.shapes:
            raise AdapterMismatch(
                f"{name}: the base has no linear {module}; it has {base.num_layers} layers with {', '.join(KINDS)}. "
                "Was the adapter trained on another base?",
                tensor=name,
            )
        if factor in factors.setdefault(module, {}):
            other = factors[module][factor].name
            raise AdapterMismatch(f"{name} and {other} are the same factor; keep one", tensor=name)
        factors[module][factor] = tensor
    if len(adapter_names) > 1:
        raise InvalidAdapter(
            f"{WEIGHTS_FILE} mixes several adapters ({', '.join(sorted(str(name) for name in adapter_names)[:4])}); "
            "save one adapter per file",
            field=WEIGHTS_FILE,
        )
    return factors


def _not_a_factor(name: str) -> InvalidAdapter:
    for pattern, field, what in _OTHER_TENSORS:
        if pattern.fullmatch(name):
            return UnsupportedAdapter(f"{name}: {what} ({field}) cannot be served", field=field, tensor=name)
    return AdapterMismatch(
        f"{name} is not a LoRA factor; expected names such as "
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
        tensor=name,
    )


def _check_coverage(config: LoraConfig, factors: _Factors, base: BaseLinears) -> None:
    """Check that the file has exactly the modules that the config targets, each as a pair."""
    for module in base.shapes:
        targeted = config.targets_module(f"model.{module}", layer_of(module))
        pair = factors.get(module, {})
        if pair and not targeted:
            name = next(iter(pair.values())).name
            raise AdapterMismatch(
                f"{name}: adapter_config.json does not target {module}, yet the file has a LoRA for it",
                tensor=name,
                field="target_modules",
            )
        for factor in "AB" if targeted else "":
            if factor not in pair:
                name = f"base_model.model.model.{module}.lora_{factor}.weight"
                raise AdapterMismatch(
                    f"{name} is missing: adapter_config.json targets {module}, but the file has no such tensor",
                    tensor=name,
                    field="target_modules",
                )


def _module(module: str, pair: Mapping[str, StoredTensor], config: LoraConfig, base: BaseLinears) -> PackedModule:
    out, inner = base.shapes[module]
    rank = config.rank_of(f"model.{module}")
    a, b = pair["A"], pair["B"]
    for tensor, expected in ((a, (rank, inner)), (b, (out, rank))):
        if tensor.shape != expected:
            raise AdapterMismatch(
                f"{tensor.name} has shape {list(tensor.shape)}, expected {list(expected)}: rank {rank} by "
                f"adapter_config.json, and the base's {module} maps {inner} to {out}",
                tensor=tensor.name,
                expected=list(expected),
                actual=list(tensor.shape),
            )
        if tensor.dtype not in NUMPY_DTYPES:
            raise UnsupportedAdapter(
                f"{tensor.name} is stored as {tensor.dtype}; save it as one of {', '.join(NUMPY_DTYPES)}",
                tensor=tensor.name,
                expected="/".join(NUMPY_DTYPES),
                actual=tensor.dtype,
            )
        if not _all_finite(tensor):
            raise CorruptArtifact(
                f"{tensor.name} contains NaN or infinity; the training diverged or the file is damaged",
                tensor=tensor.name,
            )
    if a.dtype != b.dtype:
        raise AdapterMismatch(
            f"{b.name} is {b.dtype} and {a.name} is {a.dtype}; both factors of a module must have one dtype",
            tensor=b.name,
            expected=a.dtype,
            actual=b.dtype,
        )
    return PackedModule(module, rank, config.scale_of(f"model.{module}"), a.dtype, a.array(), b.array())


def _all_finite(tensor: StoredTensor) -> bool:
    values: NDArray[Any] = tensor.array()
    if tensor.dtype == "BF16":  # an exponent of all ones is infinity or NaN
        return not bool(((values & 0x7F80) == 0x7F80).any())
    return bool(np.isfinite(values).all())
