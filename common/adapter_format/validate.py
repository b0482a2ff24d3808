"""From an uploaded PEFT folder to an adapter that is known to fit its base, or a refusal that names the tensor.

Every tensor of the file must be a part of a LoRA, or a whole matrix, of a module of the base, in the shape, rank and
dtype that config and base ask for; every module that the config targets must have its parts; values must be finite and
do something.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from common.adapter_format.base import BaseLinears, full_name
from common.adapter_format.base_weights import BaseWeights, WeightsSource, no_weights
from common.adapter_format.config import LoraConfig, parse_config
from common.adapter_format.coverage import check_config, check_coverage
from common.adapter_format.dora import dora_affine
from common.adapter_format.effect import has_effect
from common.adapter_format.load_facts import BY_MANIFEST, BY_WEIGHTS, LoadFacts, features_of
from common.adapter_format.modules import PackedAdapter, PackedAffine, PackedMatrix, PackedModule
from common.adapter_format.packed import FORMAT_NONE, version_digest
from common.adapter_format.parts import widen
from common.adapter_format.same_as_base import check_copies, is_same
from common.adapter_format.tensor_checks import check_dtype, check_finite, check_shape
from common.adapter_format.tensor_file import StoredTensor, open_tensors
from common.adapter_format.tensor_names import BIAS, MAGNITUDE, A, B, sort_tensors
from loraplex.errors import AdapterMismatch, InvalidAdapter
from loraplex.peft_folder import WEIGHTS_FILE

__all__ = ["WEIGHTS_FILE", "Validated", "examine", "validate"]


@dataclass(frozen=True, slots=True)
class Validated:
    """An adapter that fits its base, and what became of its file."""

    adapter: PackedAdapter
    facts: LoadFacts


def validate(
    config_raw: bytes, weights: Path, base: BaseLinears, base_weights: WeightsSource = no_weights
) -> PackedAdapter:
    """Return the adapter of `examine` alone."""
    return examine(config_raw, weights, base, base_weights).adapter


def examine(config_raw: bytes, weights: Path, base: BaseLinears, base_weights: WeightsSource = no_weights) -> Validated:
    """Check the bytes of adapter_config.json and the safetensors file against the base.

    The arrays of the result are views of the mapped file. `base_weights` is asked only where the weights are needed.
    Raises InvalidAdapter or one of its kinds (UnsupportedAdapter, AdapterMismatch, CorruptArtifact); metadata `field`
    or `tensor` names what is at fault. Raises what `base_weights` does.
    """
    config = parse_config(config_raw)
    check_config(config, base)
    stored = open_tensors(weights).tensors
    found = sort_tensors(stored, base)
    check_coverage(config, found, base)
    opened = _Opened(base_weights)
    modules = tuple(_module(name, parts, config, base) for name, parts in sorted(found.parts.items()))
    saved = {name: tensor for name, tensor in sorted(found.saved.items()) if config.saves_module(full_name(name))}
    copies = {(name, "weight"): tensor for name, tensor in found.saved.items() if name not in saved} | found.copies
    dropped = check_copies(copies, base, opened)
    matrices = _matrices(saved, base)
    dropped += [tensor.name for name, tensor in saved.items() if name not in {matrix.name for matrix in matrices}]
    # Last, as it may take long: the base's weights are read.
    modules = tuple(_with_affine(module, found.parts[module.name], config, base, opened) for module in modules)
    if not has_effect(modules, matrices):
        raise InvalidAdapter(
            f"{WEIGHTS_FILE}: the adapter changes nothing, as in every module lora_A or lora_B is zero"
            f"{' and the magnitudes are those of the base' if config.dora else ''}"
            f"{', and the saved modules are those of the base' if config.saved else ''}; was it saved before training?",
            field=WEIGHTS_FILE,
        )
    digest = version_digest(base.base_digest, modules, matrices)
    adapter = PackedAdapter(digest, base.base_digest, FORMAT_NONE, modules, matrices)
    return Validated(
        adapter,
        LoadFacts(
            num_file_tensors=len(stored),
            num_file_modules=len(found.modules),
            equal_to_base=tuple(sorted(dropped)),
            features=features_of(adapter, rslora=config.rslora),
            base_check=BY_WEIGHTS if opened.weights else BY_MANIFEST,
            trained_on=config.trained_on,
        ),
    )


class _Opened:
    """Asks for the base's weights at most once."""

    def __init__(self, source: WeightsSource) -> None:
        self._source = source
        self.weights: BaseWeights | None = None

    def __call__(self, needed_for: str) -> BaseWeights:
        if self.weights is None:
            self.weights = self._source(needed_for)
        return self.weights


def _module(module: str, parts: Mapping[str, StoredTensor], config: LoraConfig, base: BaseLinears) -> PackedModule:
    out, inner = base.shape_of(module) or (0, 0)
    rank = config.rank_of(full_name(module))
    a, b = parts[A], parts[B]
    because = f"rank {rank} by adapter_config.json, and the base's {module} maps {inner} to {out}"
    for tensor, expected in ((a, (rank, inner)), (b, (out, rank))):
        check_shape(tensor, expected, because)
        check_dtype(tensor)
        check_finite(tensor)
    if a.dtype != b.dtype:
        raise AdapterMismatch(
            f"{b.name} is {b.dtype} and {a.name} is {a.dtype}; both factors of a module must have one dtype",
            tensor=b.name,
            expected=a.dtype,
            actual=b.dtype,
        )
    for part in (BIAS, MAGNITUDE):
        if part in parts:
            check_shape(parts[part], (out,), f"the base's {module} has {out} outputs")
            check_dtype(parts[part])
            check_finite(parts[part])
    return PackedModule(module, rank, config.scale_of(full_name(module)), a.dtype, a.array(), b.array())


def _with_affine(
    module: PackedModule,
    parts: Mapping[str, StoredTensor],
    config: LoraConfig,
    base: BaseLinears,
    weights: WeightsSource,
) -> PackedModule:
    affine = None
    if config.dora:
        magnitude = widen(parts[MAGNITUDE].array(), parts[MAGNITUDE].dtype)
        affine = dora_affine(module, magnitude, base, weights("DoRA (use_dora)"))
    elif config.bias:
        affine = _bias_affine(module, parts[BIAS])
    return replace(module, affine=affine)


def _bias_affine(module: PackedModule, bias: StoredTensor) -> PackedAffine | None:
    """Return the bias times the LoRA's scale, which is applied to all that comes out of lora_B; None where it is 0."""
    with np.errstate(over="ignore"):
        shift = (module.scale * widen(bias.array(), bias.dtype).astype(np.float64)).astype(np.float32)
    if not np.isfinite(shift).all():
        raise InvalidAdapter(f"{bias.name}: times the LoRA's scale it is beyond float32", tensor=bias.name)
    return PackedAffine(np.ones_like(shift), shift) if shift.any() else None


def _matrices(saved: Mapping[str, StoredTensor], base: BaseLinears) -> tuple[PackedMatrix, ...]:
    """Return the matrices that the config saves and that are not the base's own."""
    matrices = []
    for name, tensor in saved.items():
        check_shape(tensor, base.weights[name].shape, f"that of the base's {name}; a resized vocabulary is not served")
        check_dtype(tensor)
        if not is_same(tensor, base.weights[name]):
            check_finite(tensor)
            matrices.append(PackedMatrix(name, tensor.dtype, tensor.array()))
    return tuple(matrices)
