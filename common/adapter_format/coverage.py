"""Whether config and file of an adapter ask for the same: each module that is named has all its parts, and no other."""

from __future__ import annotations

from typing import Final

from common.adapter_format.base import BaseLinears, full_name, layer_of
from common.adapter_format.config import LoraConfig
from common.adapter_format.modules import EMBEDDING, HEAD
from common.adapter_format.tensor_names import BIAS, MAGNITUDE, A, AdapterTensors, B
from loraplex.errors import AdapterMismatch, UnsupportedAdapter

_SPELLING: Final = {A: "lora_A.weight", B: "lora_B.weight", BIAS: "lora_B.bias", MAGNITUDE: "lora_magnitude_vector"}
_ASKED_BY: Final = {A: "target_modules", B: "target_modules", BIAS: "lora_bias", MAGNITUDE: "use_dora"}


def check_config(config: LoraConfig, base: BaseLinears) -> None:
    """Refuse what the config asks of modules that cannot have it."""
    for module in sorted(base.all_modules):
        if config.saves_module(module) and module not in (full_name(EMBEDDING), full_name(HEAD)):
            raise UnsupportedAdapter(
                f"modules_to_save includes {module}; only {EMBEDDING} and {HEAD} can be served fully trained",
                field="modules_to_save",
            )
    if config.bias and config.dora:
        raise UnsupportedAdapter("lora_bias and use_dora cannot be had together", field="lora_bias")
    if config.bias and config.targets_module(full_name(EMBEDDING), None):
        raise UnsupportedAdapter(f"lora_bias on {EMBEDDING} cannot be served; PEFT has no such", field="lora_bias")


def check_coverage(config: LoraConfig, found: AdapterTensors, base: BaseLinears) -> None:
    """Check that the file has exactly the modules that the config asks for, each with all its parts."""
    asked = (A, B, *((BIAS,) if config.bias else ()), *((MAGNITUDE,) if config.dora else ()))
    for module in (*base.shapes, *base.outside):
        targeted = config.targets_module(full_name(module), None if module in base.outside else layer_of(module))
        parts = found.parts.get(module, {})
        for part, tensor in parts.items():
            if not targeted or part not in asked:
                field = _ASKED_BY[part] if targeted else "target_modules"
                raise AdapterMismatch(
                    f"{tensor.name}: adapter_config.json does not ask for it ({field}), yet the file has it",
                    tensor=tensor.name,
                    field=field,
                )
        for part in asked if targeted else ():
            if part not in parts:
                spelled = _SPELLING[part]
                if module == EMBEDDING and part in (A, B):
                    spelled = f"lora_embedding_{part[-1]}"
                name = f"base_model.model.{full_name(module)}.{spelled}"
                raise AdapterMismatch(
                    f"{name} is missing: adapter_config.json targets {module}, but the file has no such tensor",
                    tensor=name,
                    field=_ASKED_BY[part],
                )
        if config.saves_module(full_name(module)) and module not in found.saved:
            name = f"base_model.model.{full_name(module)}.weight"
            raise AdapterMismatch(
                f"{name} is missing: adapter_config.json saves {module}, but the file has no such tensor",
                tensor=name,
                field="modules_to_save",
            )
