"""The names that PEFT gives an adapter's tensors, taken apart: which module of the base, and which part of it.

Old and new spellings alike: with or without the prefix of PEFT's wrapper, with or without the adapter's own name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

from common.adapter_format.base import KINDS, BaseLinears
from common.adapter_format.modules import EMBEDDING
from common.adapter_format.tensor_file import StoredTensor
from loraplex.errors import AdapterMismatch, InvalidAdapter, UnsupportedAdapter
from loraplex.peft_folder import WEIGHTS_FILE

_Key = TypeVar("_Key")

A, B, BIAS, MAGNITUDE = "lora_A", "lora_B", "bias", "magnitude"
"""The parts of a LoRA."""

_MODULE: Final = (
    r"(?:base_model\.model\.)?(?:model\.)?(?P<module>layers\.(?:0|[1-9]\d{0,5})\.\w+\.\w+|embed_tokens|lm_head)"
)
_ADAPTER: Final = r"(?:\.(?P<adapter>(?!weight$)[\w-]+))?"
_PARTS: Final = (
    (re.compile(rf"{_MODULE}\.(?P<part>lora_[AB]){_ADAPTER}\.weight"), None),
    (re.compile(rf"{_MODULE}\.lora_embedding_(?P<part>[AB]){_ADAPTER}"), None),
    (re.compile(rf"{_MODULE}\.lora_B{_ADAPTER}\.bias"), BIAS),
    (re.compile(rf"{_MODULE}\.lora_magnitude_vector{_ADAPTER}(?:\.weight)?"), MAGNITUDE),
)
_EMBEDDING_FACTOR: Final = re.compile(r".*\.lora_embedding_[AB](\..*)?")
_COPY: Final = re.compile(rf"{_MODULE}\.base_layer\.(?P<parameter>weight|bias)")
_SAVED: Final = re.compile(
    rf"(?:base_model\.model\.)?(?:model\.)?(?P<module>embed_tokens|lm_head)(?:\.modules_to_save{_ADAPTER})?\.weight"
)
# What else PEFT writes, and the config field that asked for it.
_OTHER_TENSORS: Final = (
    (re.compile(r".*\.(trainable_tokens_.*|token_adapter\..*)"), "trainable_token_indices", "trained tokens"),
    (re.compile(r".*\.modules_to_save\..*"), "modules_to_save", "a fully trained module"),
    (re.compile(r"(?!.*\.lora_).*\.bias"), "bias", "trained biases"),
)


@dataclass(slots=True)
class AdapterTensors:
    """A file's tensors by module.

    `parts` are those of LoRAs, {module: {part: tensor}}; `saved` whole weights of embedding or head, and `copies` what
    the base has below a LoRA, by (module, "weight" or "bias").
    """

    parts: dict[str, dict[str, StoredTensor]] = field(default_factory=dict)
    saved: dict[str, StoredTensor] = field(default_factory=dict)
    copies: dict[tuple[str, str], StoredTensor] = field(default_factory=dict)

    @property
    def modules(self) -> set[str]:
        """All modules that the file has a tensor for."""
        return {*self.parts, *self.saved, *(module for module, _ in self.copies)}


def sort_tensors(tensors: Mapping[str, StoredTensor], base: BaseLinears) -> AdapterTensors:
    """Sort a file's tensors by module and part.

    Raises AdapterMismatch or UnsupportedAdapter, naming the tensor, for one that is of no module of the base or of
    nothing that PEFT's LoRA has, and InvalidAdapter where the file mixes several adapters.
    """
    if not tensors:
        raise InvalidAdapter(f"{WEIGHTS_FILE} holds no tensors", field=WEIGHTS_FILE)
    found = AdapterTensors()
    adapters: set[str | None] = set()
    for name, tensor in tensors.items():
        match, part = _lora_part(name)
        if match is not None:
            adapters.add(match["adapter"])
            module = _known_module(name, match["module"], base)
            if bool(_EMBEDDING_FACTOR.fullmatch(name)) != (module == EMBEDDING and part in (A, B)):
                raise AdapterMismatch(f"{name} is no factor that a LoRA of {module} has", tensor=name)
            _put(found.parts.setdefault(module, {}), part, tensor)
        elif match := _COPY.fullmatch(name):
            _put(found.copies, (_known_module(name, match["module"], base), match["parameter"]), tensor)
        elif match := _SAVED.fullmatch(name):
            adapters |= {match["adapter"]} - {None}
            _put(found.saved, _known_module(name, match["module"], base), tensor)
        else:
            raise _not_known(name)
    if len(adapters) > 1:
        raise InvalidAdapter(
            f"{WEIGHTS_FILE} mixes several adapters ({', '.join(sorted(str(name) for name in adapters)[:4])}); "
            "save one adapter per file",
            field=WEIGHTS_FILE,
        )
    return found


def _lora_part(name: str) -> tuple[re.Match[str] | None, str]:
    for pattern, part in _PARTS:
        if match := pattern.fullmatch(name):
            return match, part or f"lora_{match['part'][-1]}"
    return None, ""


def _known_module(name: str, module: str, base: BaseLinears) -> str:
    if base.shape_of(module) is None:
        raise AdapterMismatch(
            f"{name}: the base has no module {module}; it has {base.num_layers} layers with {', '.join(KINDS)}. "
            "Was the adapter trained on another base?",
            tensor=name,
        )
    return module


def _put(place: dict[_Key, StoredTensor], key: _Key, tensor: StoredTensor) -> None:
    if key in place:
        raise AdapterMismatch(f"{tensor.name} and {place[key].name} are the same; keep one", tensor=tensor.name)
    place[key] = tensor


def _not_known(name: str) -> InvalidAdapter:
    for pattern, config_field, what in _OTHER_TENSORS:
        if pattern.fullmatch(name):
            return UnsupportedAdapter(
                f"{name}: {what} ({config_field}) cannot be served", field=config_field, tensor=name
            )
    return AdapterMismatch(
        f"{name} is not a LoRA factor; expected names such as "
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
        tensor=name,
    )
