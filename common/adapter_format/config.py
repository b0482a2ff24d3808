"""adapter_config.json as PEFT writes it, read strictly.

Fields that do not change the answer at inference are ignored; fields that do and are not supported are refused by
name; a field this reader does not know is refused when it is set to anything. Knows the config only, not the tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeGuard

from common.adapter_format.config_fields import refuse_unsupported
from common.adapter_format.patterns import MAX_LENGTH, Pattern, UnsafePattern, compile_pattern, is_plain
from common.wording import shown
from loraplex.errors import InvalidAdapter, UnsupportedAdapter
from loraplex.peft_folder import CONFIG_FILE

_ALL_LINEAR: Final = "all-linear"
_MAX_RANK: Final = 2**16
_MAX_NAME: Final = 200
_MAX_PATTERNS: Final = 4096  # several times the linears of the largest models
_MIN_ALPHA: Final = 1e-30  # far less is 0 in float32: the base, silently
_MAX_ALPHA: Final = 1e30


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """What of an adapter_config.json changes the answer. `targets` None means all linears of the layers."""

    rank: int
    alpha: float
    rslora: bool
    targets: tuple[str, ...] | Pattern | None
    excluded: tuple[str, ...] | Pattern
    layers: frozenset[int] | None
    rank_pattern: tuple[tuple[Pattern, int], ...]
    alpha_pattern: tuple[tuple[Pattern, float], ...]
    dora: bool
    bias: bool
    """Whether lora_B has a bias."""
    saved: tuple[str, ...]
    """modules_to_save."""
    trained_on: str = field(compare=False)
    """What the config calls its base, for people."""

    def targets_module(self, module: str, layer: int | None) -> bool:
        """Tell whether the config puts a LoRA on `module` ("model.layers.0.self_attn.q_proj") of this layer."""
        if _listed(self.excluded, module) or self.saves_module(module):
            return False
        if self.targets is None:
            return layer is not None
        if isinstance(self.targets, tuple) and module in self.targets:
            return True  # named in full, as lm_head is: PEFT asks layers_to_transform of names that are ends of names
        return _listed(self.targets, module) and (self.layers is None or layer in self.layers)

    def saves_module(self, module: str) -> bool:
        """Tell whether the config replaces the whole of `module`; by the end of its name, as PEFT does."""
        return module.endswith(self.saved)

    def rank_of(self, module: str) -> int:
        """Return the rank that the config gives this module."""
        return next((rank for pattern, rank in self.rank_pattern if pattern.matches_suffix(module)), self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of BAx: alpha / rank, or alpha / sqrt(rank) with rsLoRA."""
        alpha = next((alpha for pattern, alpha in self.alpha_pattern if pattern.matches_suffix(module)), self.alpha)
        rank = self.rank_of(module)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank


def _listed(names: tuple[str, ...] | Pattern, module: str) -> bool:
    if isinstance(names, Pattern):
        return names.matches(module)
    return any(module == name or module.endswith(f".{name}") for name in names)


def parse_config(raw: bytes) -> LoraConfig:
    """Read the bytes of an adapter_config.json.

    Raises InvalidAdapter where the file or a value is malformed and UnsupportedAdapter where a field asks for
    something that is not served; metadata `field` names it.
    """
    fields = _parse_json(raw)
    if fields.get("peft_type") != "LORA":
        raise UnsupportedAdapter(
            f"{CONFIG_FILE}: peft_type is {shown(fields.get('peft_type'))}; only LORA adapters can be served",
            field="peft_type",
        )
    refuse_unsupported(fields)
    targets = _targets(fields.get("target_modules"))
    layers = _layers(fields)
    if layers is not None and not isinstance(targets, tuple):
        raise InvalidAdapter(
            f"{CONFIG_FILE}: layers_to_transform needs target_modules to be a list of names",
            field="layers_to_transform",
        )
    return LoraConfig(
        rank=_rank("r", fields.get("r", 8)),  # absent fields mean PEFT's defaults
        alpha=_alpha("lora_alpha", fields.get("lora_alpha", 8)),
        rslora=_flag("use_rslora", fields),
        targets=targets,
        excluded=_names("exclude_modules", fields.get("exclude_modules") or []),
        layers=layers,
        rank_pattern=tuple((p, _rank("rank_pattern", v)) for p, v in _patterns("rank_pattern", fields)),
        alpha_pattern=tuple((p, _alpha("alpha_pattern", v)) for p, v in _patterns("alpha_pattern", fields)),
        dora=_flag("use_dora", fields),
        bias=_flag("lora_bias", fields),
        saved=_saved(fields.get("modules_to_save") or []),
        trained_on=_printable(fields.get("base_model_name_or_path")),
    )


def _parse_json(raw: bytes) -> Mapping[str, Any]:
    try:
        fields = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InvalidAdapter(f"{CONFIG_FILE} is not JSON: {error}", field=CONFIG_FILE) from error
    if not isinstance(fields, dict):
        raise InvalidAdapter(f"{CONFIG_FILE} is not a JSON object", field=CONFIG_FILE)
    return fields


def _targets(value: Any) -> tuple[str, ...] | Pattern | None:
    if isinstance(value, str) and value.lower() == _ALL_LINEAR:
        return None
    if not value:
        raise InvalidAdapter(
            f"{CONFIG_FILE}: target_modules is missing or empty; list the modules the adapter changes",
            field="target_modules",
        )
    return _names("target_modules", value)


def _names(field: str, value: Any) -> tuple[str, ...] | Pattern:
    if isinstance(value, str):
        return _compiled(field, value)
    if _are_names(value):
        return tuple(sorted(set(value)))
    raise _malformed(field, value, f"a list of at most {_MAX_PATTERNS} names or a regular expression")


def _printable(value: Any) -> str:
    return value[:_MAX_NAME] if isinstance(value, str) and value[:_MAX_NAME].isprintable() else ""


def _flag(field: str, fields: Mapping[str, Any]) -> bool:
    value = fields.get(field) or False
    if not isinstance(value, bool):
        raise _malformed(field, value, "true or false")
    return value


def _saved(value: Any) -> tuple[str, ...]:
    if _are_names(value):
        return tuple(sorted(set(value)))
    raise _malformed("modules_to_save", value, f"a list of at most {_MAX_PATTERNS} names")


def _are_names(value: Any) -> TypeGuard[list[str]]:
    """Tell whether it is a list of names, of so many that each module of a base can be held against all."""
    return isinstance(value, list) and len(value) <= _MAX_PATTERNS and all(isinstance(n, str) and n for n in value)


def _layers(fields: Mapping[str, Any]) -> frozenset[int] | None:
    value = fields.get("layers_to_transform")
    patterns = fields.get("layers_pattern") or []
    patterns = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(patterns, list) or any(pattern not in ("layers", "model.layers") for pattern in patterns):
        raise UnsupportedAdapter(
            f"{CONFIG_FILE}: layers_pattern is {shown(patterns)}; the layers of a base are called model.layers",
            field="layers_pattern",
        )
    if value is None or value == []:
        return None
    indices = value if isinstance(value, list) else [value]
    if not all(isinstance(index, int) and not isinstance(index, bool) and index >= 0 for index in indices):
        raise _malformed("layers_to_transform", value, "a layer index or a list of them")
    return frozenset(indices)


def _patterns(field: str, fields: Mapping[str, Any]) -> list[tuple[Pattern, Any]]:
    value = fields.get(field) or {}
    if not isinstance(value, dict) or len(value) > _MAX_PATTERNS:
        raise _malformed(field, value, f"an object from module names to numbers, with at most {_MAX_PATTERNS} names")
    length = sum(len(key) for key in value if not is_plain(key))
    if length > MAX_LENGTH:
        raise UnsupportedAdapter(
            f"{CONFIG_FILE}: the expressions of {field} have {length} characters; at most {MAX_LENGTH} are allowed, "
            "beside plain module names",
            field=field,
        )
    return [(_compiled(field, key), number) for key, number in value.items()]


def _compiled(field: str, text: str) -> Pattern:
    try:
        return compile_pattern(text)
    except UnsafePattern as error:
        raise UnsupportedAdapter(f"{CONFIG_FILE}: {field} {shown(text)}: {error}", field=field) from error


def _rank(field: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_RANK:
        raise _malformed(field, value, f"an integer from 1 to {_MAX_RANK}")
    return value


def _alpha(field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not _MIN_ALPHA <= value <= _MAX_ALPHA:
        raise _malformed(field, value, f"a number from {_MIN_ALPHA:g} to {_MAX_ALPHA:g}")
    return float(value)


def _malformed(field: str, value: Any, wanted: str) -> InvalidAdapter:
    return InvalidAdapter(f"{CONFIG_FILE}: {field} must be {wanted}, not {shown(value)}", field=field)
