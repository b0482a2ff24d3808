"""adapter_config.json as PEFT writes it, read strictly.

Fields that do not change the answer at inference are ignored; fields that do and are not supported are refused by
name; a field this reader does not know is refused when it is set to anything. Knows the config only, not the tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from common.adapter_format.patterns import MAX_LENGTH, Pattern, UnsafePattern, compile_pattern, is_plain
from common.wording import shown
from loraplex.errors import InvalidAdapter, UnsupportedAdapter
from loraplex.peft_folder import CONFIG_FILE

_ALL_LINEAR: Final = "all-linear"
_MAX_RANK: Final = 2**16
_MAX_PATTERNS: Final = 4096  # several times the linears of the largest models
_MIN_ALPHA: Final = 1e-30  # far less is 0 in float32: the base, silently
_MAX_ALPHA: Final = 1e30

# Used in training, for initialisation, or to find the base; the maths at inference is the same whatever they say.
_IGNORED: Final = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)
# Read below.
_USED: Final = frozenset(
    {
        "alpha_pattern",
        "bias",
        "exclude_modules",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "use_rslora",
    }
)
# Change the maths and are not served.
_REFUSED: Final = {
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow routing",
    "ensure_weight_tying": "tied adapters",
    "fan_in_fan_out": "transposed weights",
    "kasa_config": "KaSA",
    "layer_replication": "replicated layers",
    "lora_bias": "a LoRA bias",
    "megatron_config": "Megatron layers",
    "modules_to_save": "fully trained modules",
    "monteclora_config": "Monte Carlo LoRA",
    "target_parameters": "adapters on bare parameters",
    "trainable_token_indices": "trained token embeddings",
    "use_bdlora": "block-diagonal LoRA",
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "velora_config": "VeLoRA",
}
# Ways to initialise that leave the base weights as they are.
_PLAIN_INITS: Final = (True, False, None, "gaussian", "orthogonal", "eva", "mica")


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

    def targets_module(self, module: str, layer: int | None) -> bool:
        """Tell whether the config puts a LoRA on `module` ("model.layers.0.self_attn.q_proj") of this layer."""
        if _listed(self.excluded, module):
            return False
        if self.targets is None:
            return layer is not None
        return _listed(self.targets, module) and (self.layers is None or layer in self.layers)

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
    _refuse_unsupported(fields)
    rslora = fields.get("use_rslora", False)
    if not isinstance(rslora, bool):
        raise _malformed("use_rslora", rslora, "true or false")
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
        rslora=rslora,
        targets=targets,
        excluded=_names("exclude_modules", fields.get("exclude_modules") or []),
        layers=layers,
        rank_pattern=tuple((p, _rank("rank_pattern", v)) for p, v in _patterns("rank_pattern", fields)),
        alpha_pattern=tuple((p, _alpha("alpha_pattern", v)) for p, v in _patterns("alpha_pattern", fields)),
    )


def _parse_json(raw: bytes) -> Mapping[str, Any]:
    try:
        fields = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InvalidAdapter(f"{CONFIG_FILE} is not JSON: {error}", field=CONFIG_FILE) from error
    if not isinstance(fields, dict):
        raise InvalidAdapter(f"{CONFIG_FILE} is not a JSON object", field=CONFIG_FILE)
    return fields


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        if name in _REFUSED and value:
            raise UnsupportedAdapter(
                f"{CONFIG_FILE}: {name} is {shown(value)}; {_REFUSED[name]} cannot be served", field=name
            )
        if value and name not in _IGNORED | _USED | _REFUSED.keys():
            raise UnsupportedAdapter(
                f"{CONFIG_FILE}: the field {shown(name)} is not known and set to {shown(value)}; it may change what "
                "the adapter computes, so it is refused. Remove it if it does not",
                field=shown(name).strip('"'),
            )
    if fields.get("bias", "none") not in ("none", None):
        raise UnsupportedAdapter(
            f"{CONFIG_FILE}: bias is {shown(fields['bias'])}; trained biases cannot be served, only none", field="bias"
        )
    init = fields.get("init_lora_weights", True)
    if not any(init is plain or (isinstance(plain, str) and init == plain) for plain in _PLAIN_INITS):
        raise UnsupportedAdapter(
            f"{CONFIG_FILE}: init_lora_weights is {shown(init)}, which changes the base weights it was trained on; "
            "export it as a plain LoRA with save_pretrained(..., path_initial_model_for_weight_conversion=...)",
            field="init_lora_weights",
        )


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
    if isinstance(value, list) and all(isinstance(name, str) and name for name in value):
        return tuple(sorted(set(value)))
    raise _malformed(field, value, "a list of names or a regular expression")


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
