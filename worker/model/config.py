"""What a base model's config.json says about its maths, as one typed value, and the refusal of what we cannot compute.

Owns the mapping from Hugging Face fields (both the old `rope_theta`/`rope_scaling` and the newer `rope_parameters`) to
`ModelConfig`. Knows nothing of weights or torch. Fields that the model family's reference code does not read cannot
change its answers and are ignored; those of other families that would are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from loraplex.errors import InvalidBaseModel
from loraplex.families import check_family
from worker.model.rope import RopeConfig, rope_from_config

_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    # field: the values besides null, false and "absent" that leave the maths as it is
    "alibi": (),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "embedding_multiplier": (1, 1.0),
    "final_logit_softcapping": (),
    "logit_scale": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "moe_intermediate_size": (),
    "n_routed_experts": (0, 1),
    "no_rope_layer_interval": (),
    "no_rope_layers": ([],),
    "num_experts": (0, 1),
    "num_experts_per_tok": (0, 1),
    "num_local_experts": (0, 1),
    "parallel_attn": (),
    "partial_rotary_factor": (1, 1.0),
    "quantization_config": (),
    "residual_multiplier": (1, 1.0),
    "rope_interleaved": (),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and constants of a decoder of the Llama family; sizes count elements."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_context_tokens: int
    """Positions the model is right for: max_position_embeddings, or the sliding window where that is shorter."""
    tied_embeddings: bool
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool

    @property
    def q_size(self) -> int:
        """Width of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim

    def module_shapes(self) -> dict[str, tuple[int, int]]:
        """(in, out) features of a layer's linear modules, by the name an adapter uses for them."""
        hidden, inner = self.hidden_size, self.intermediate_size
        return {
            "self_attn.q_proj": (hidden, self.q_size),
            "self_attn.k_proj": (hidden, self.kv_size),
            "self_attn.v_proj": (hidden, self.kv_size),
            "self_attn.o_proj": (self.q_size, hidden),
            "mlp.gate_proj": (hidden, inner),
            "mlp.up_proj": (hidden, inner),
            "mlp.down_proj": (inner, hidden),
        }


def read_config(folder: Path) -> ModelConfig:
    """Read `folder`/config.json. Raises InvalidBaseModel, naming the field and the remedy."""
    return parse_config(_read_json(folder / "config.json"))


def read_eos_token_ids(folder: Path) -> frozenset[int]:
    """Return the tokens that end a sequence: generation_config.json's, else config.json's, else none."""
    for name in ("generation_config.json", "config.json"):
        if not (folder / name).exists():
            continue
        eos = _read_json(folder / name).get("eos_token_id")
        if eos is None:
            continue
        ids = eos if isinstance(eos, list) else [eos]
        if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
            raise _refusal("eos_token_id", f"{name}: eos_token_id must be a token id or a list of them, not {eos!r}")
        return frozenset(ids)
    return frozenset()


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Return the typed config of a parsed config.json. Raises InvalidBaseModel, naming the field."""
    family = check_family(raw)
    _refuse_foreign_maths(raw)
    heads = _positive(raw, "num_attention_heads")
    hidden = _positive(raw, "hidden_size")
    kv_heads = heads if raw.get("num_key_value_heads") is None else _positive(raw, "num_key_value_heads")
    if "num_key_value_heads" not in raw and family != "llama":  # the families' code disagrees on what absence means
        raise _refusal("num_key_value_heads", "config.json lacks num_key_value_heads")
    if heads % kv_heads:
        raise _refusal(
            "num_key_value_heads", f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
        )
    head_dim = _head_dim(raw, family, hidden, heads)
    positions = _positive(raw, "max_position_embeddings")
    attention_bias = family == "qwen2" or (family != "mistral" and bool(raw.get("attention_bias", False)))
    return ModelConfig(
        family=family,
        vocab_size=_positive(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_positive(raw, "intermediate_size"),
        num_layers=_positive(raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_rms_norm_eps(raw),
        rope=rope_from_config(raw, head_dim, positions),
        max_context_tokens=min(positions, _sliding_window(raw, family) or positions),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qk_norm=family == "qwen3",
        qkv_bias=attention_bias,
        o_bias=attention_bias and family != "qwen2",
        mlp_bias=family == "llama" and bool(raw.get("mlp_bias", False)),
    )


def _refuse_foreign_maths(raw: Mapping[str, Any]) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise _refusal("hidden_act", f"hidden_act {activation!r} is not supported, only silu")
    for field, neutral in _NEUTRAL.items():
        value = raw.get(field)
        if value is None or value is False or value in neutral:
            continue
        raise _refusal(field, f"config.json sets {field} to {value!r}, which this decoder does not compute")
    remote = raw.get("auto_map")
    if isinstance(remote, Mapping) and any(name.startswith("AutoModel") for name in remote):
        raise _refusal("auto_map", "auto_map names model code of its own; only the family's standard maths is served")


def _head_dim(raw: Mapping[str, Any], family: str, hidden: int, heads: int) -> int:
    if raw.get("head_dim") is not None:
        head_dim = _positive(raw, "head_dim")
    elif family == "qwen3" and "head_dim" not in raw:
        head_dim = 128  # the family's default, unlike the others'
    elif hidden % heads:
        raise _refusal("hidden_size", f"hidden_size {hidden} is no multiple of num_attention_heads {heads}")
    else:
        head_dim = hidden // heads
    if head_dim % 2:
        raise _refusal("head_dim", f"head_dim {head_dim} is odd; rotary embeddings need an even one")
    return head_dim


def _sliding_window(raw: Mapping[str, Any], family: str) -> int | None:
    """Return the window of tokens that some layer is restricted to, or None."""
    if family == "llama":
        return None
    if family == "mistral":
        absent = "sliding_window" not in raw  # absence means the family's default, null means none
        return 4096 if absent else _optional_positive(raw, "sliding_window")
    if not raw.get("use_sliding_window", False):
        return None
    window = _optional_positive(raw, "sliding_window") if "sliding_window" in raw else 4096
    layer_types = raw.get("layer_types")
    if layer_types is not None:
        return window if "sliding_attention" in layer_types else None
    first = raw.get("max_window_layers", 28)
    return window if first < _positive(raw, "num_hidden_layers") else None


def _rms_norm_eps(raw: Mapping[str, Any]) -> float:
    eps = raw.get("rms_norm_eps", 1e-6)
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 < eps < 1:
        raise _refusal("rms_norm_eps", f"rms_norm_eps must lie between 0 and 1, not {eps!r}")
    return float(eps)


def _positive(raw: Mapping[str, Any], field: str) -> int:
    value = raw.get(field)
    if value is None:
        raise _refusal(field, f"config.json lacks {field}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _refusal(field, f"config.json: {field} must be a positive integer, not {value!r}")
    return value


def _optional_positive(raw: Mapping[str, Any], field: str) -> int | None:
    return None if raw.get(field) is None else _positive(raw, field)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _refusal("base", f"{path} cannot be read: {error.strerror}; give a Hugging Face folder") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise _refusal("base", f"{path} is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise _refusal("base", f"{path} is not a JSON object")
    return parsed


def _refusal(field: str, message: str) -> InvalidBaseModel:
    return InvalidBaseModel(message, field=field)
