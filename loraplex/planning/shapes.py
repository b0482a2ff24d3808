"""Shapes of base models: those that have a name here, and those of a config.json.

Figures are the ones that the models' authors publish in config.json. Knows sizes only, never what a model computes;
whether a config can be served at all is the worker's to say.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from loraplex.errors import InvalidBaseModel, InvalidParameter
from loraplex.families import check_family
from loraplex.manifest import MAX_HEADER_BYTES, weight_files
from loraplex.safetensors_header import read_header

DTYPE_BYTES: Final[Mapping[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2}
SITES: Final = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
"""A layer's linears; those in one group read the same input and are fused on the worker."""
MODULES: Final = tuple(name for site in SITES for name in site)
TARGETS: Final[Mapping[str, str]] = {name.rsplit(".", 1)[1]: name for name in MODULES}
"""The linears by the names that adapter configs use."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder of the Llama family, in elements; `stored_dtype` is that of its weights on the disk."""

    name: str
    family: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context_tokens: int
    tied_embeddings: bool = False
    stored_dtype: str = "bfloat16"
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False

    def module_shapes(self) -> dict[str, tuple[int, int]]:
        """Return (in, out) features of a layer's linears."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (hidden, q),
            "self_attn.k_proj": (hidden, kv),
            "self_attn.v_proj": (hidden, kv),
            "self_attn.o_proj": (q, hidden),
            "mlp.gate_proj": (hidden, inner),
            "mlp.up_proj": (hidden, inner),
            "mlp.down_proj": (inner, hidden),
        }

    def has_bias(self, site: int) -> bool:
        """Whether the linears of a site of SITES have biases."""
        return (self.qkv_bias, self.o_bias, self.mlp_bias, self.mlp_bias)[site]

    @property
    def num_norm_elements(self) -> int:
        """Elements of all norms."""
        per_layer = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        return self.num_layers * per_layer + self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Stored weights; a tied matrix counts once."""
        shapes = self.module_shapes()
        linears = sum(
            shapes[name][0] * shapes[name][1] + (shapes[name][1] if self.has_bias(site) else 0)
            for site, names in enumerate(SITES)
            for name in names
        )
        outer = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return self.num_layers * linears + outer + self.num_norm_elements


_Sizes = tuple[int, int, int, int, int, int, int, int]


def _llama(name: str, sizes: _Sizes, *, tied: bool = False, stored: str = "bfloat16") -> ModelShape:
    return ModelShape(name, "llama", *sizes, tied_embeddings=tied, stored_dtype=stored)


def _qwen2(name: str, sizes: _Sizes, *, tied: bool = False) -> ModelShape:
    return ModelShape(name, "qwen2", *sizes, tied_embeddings=tied, qkv_bias=True)


def _qwen3(name: str, sizes: _Sizes, *, tied: bool = False) -> ModelShape:
    return ModelShape(name, "qwen3", *sizes, tied_embeddings=tied, qk_norm=True)


# hidden, intermediate, layers, heads, kv heads, head dim, vocabulary, context
_NAMED: Final = (
    _llama("Llama-2-7B", (4096, 11008, 32, 32, 32, 128, 32000, 4096), stored="float16"),
    _llama("Llama-3.1-8B", (4096, 14336, 32, 32, 8, 128, 128256, 131072)),
    _llama("Llama-3.1-70B", (8192, 28672, 80, 64, 8, 128, 128256, 131072)),
    _llama("Llama-3.2-1B", (2048, 8192, 16, 32, 8, 64, 128256, 131072), tied=True),
    _llama("Llama-3.2-3B", (3072, 8192, 28, 24, 8, 128, 128256, 131072), tied=True),
    _llama("Llama-3.3-70B", (8192, 28672, 80, 64, 8, 128, 128256, 131072)),
    ModelShape("Mistral-7B", "mistral", 4096, 14336, 32, 32, 8, 128, 32768, 32768),
    _qwen2("Qwen2.5-0.5B", (896, 4864, 24, 14, 2, 64, 151936, 32768), tied=True),
    _qwen2("Qwen2.5-1.5B", (1536, 8960, 28, 12, 2, 128, 151936, 32768), tied=True),
    _qwen2("Qwen2.5-3B", (2048, 11008, 36, 16, 2, 128, 151936, 32768), tied=True),
    _qwen2("Qwen2.5-7B", (3584, 18944, 28, 28, 4, 128, 152064, 32768)),
    _qwen2("Qwen2.5-14B", (5120, 13824, 48, 40, 8, 128, 152064, 32768)),
    _qwen2("Qwen2.5-32B", (5120, 27648, 64, 40, 8, 128, 152064, 32768)),
    _qwen3("Qwen3-0.6B", (1024, 3072, 28, 16, 8, 128, 151936, 40960), tied=True),
    _qwen3("Qwen3-1.7B", (2048, 6144, 28, 16, 8, 128, 151936, 40960), tied=True),
    _qwen3("Qwen3-4B", (2560, 9728, 36, 32, 8, 128, 151936, 40960), tied=True),
    _qwen3("Qwen3-8B", (4096, 12288, 36, 32, 8, 128, 151936, 40960)),
    _qwen3("Qwen3-14B", (5120, 17408, 40, 40, 8, 128, 151936, 40960)),
    _qwen3("Qwen3-32B", (5120, 25600, 64, 64, 8, 128, 151936, 40960)),
    _llama("SmolLM2-135M", (576, 1536, 30, 9, 3, 64, 49152, 8192), tied=True),
    _llama("SmolLM2-360M", (960, 2560, 32, 15, 5, 64, 49152, 8192), tied=True),
    _llama("SmolLM2-1.7B", (2048, 8192, 24, 32, 32, 64, 49152, 8192), tied=True),
)
SHAPES: Final[Mapping[str, ModelShape]] = {shape.name: shape for shape in _NAMED}
"""Named shapes; Qwen's contexts are those of the instruct models."""


def named_shape(name: str) -> ModelShape:
    """Return the shape of that name, in any case; "-Instruct" and an owner do not matter. Raises InvalidParameter."""
    wanted = name.rsplit("/", 1)[-1].lower().removeprefix("meta-").removesuffix("-instruct")
    for shape in SHAPES.values():
        if shape.name.lower() == wanted:
            return shape
    raise InvalidParameter(
        f"--model {name!r} is not known; known are {', '.join(SHAPES)}; or give the model's folder with --base-dir",
        field="model",
    )


def shape_from_folder(folder: Path) -> ModelShape:
    """Return the shape of a Hugging Face folder; only config.json is needed.

    Raises InvalidBaseModel, naming the field, for a family or a config that no worker serves.
    """
    file = folder / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidBaseModel(f"--base-dir: {file} cannot be read: {error.strerror}", field="base_dir") from error
    except (ValueError, RecursionError) as error:
        raise InvalidBaseModel(f"--base-dir: {file} is not JSON: {error}", field="base_dir") from error
    if not isinstance(raw, dict):
        raise InvalidBaseModel(f"--base-dir: {file} is not a JSON object", field="base_dir")
    return _shape_of(raw, folder.resolve().name, _stored_dtype(folder, raw))


def _shape_of(raw: Mapping[str, Any], name: str, stored_dtype: str) -> ModelShape:
    family = check_family(raw)
    heads, hidden = _count(raw, "num_attention_heads"), _count(raw, "hidden_size")
    kv_heads = heads if raw.get("num_key_value_heads") is None else _count(raw, "num_key_value_heads")
    if raw.get("head_dim") is not None:
        head_dim = _count(raw, "head_dim")
    else:  # the family's default, where it is not the quotient
        head_dim = 128 if family == "qwen3" and "head_dim" not in raw else hidden // heads
    bias = family == "qwen2" or (family != "mistral" and bool(raw.get("attention_bias", False)))
    positions = _count(raw, "max_position_embeddings")
    return ModelShape(
        name,
        family,
        hidden,
        _count(raw, "intermediate_size"),
        _count(raw, "num_hidden_layers"),
        heads,
        kv_heads,
        head_dim,
        _count(raw, "vocab_size"),
        min(positions, _window(raw, family) or positions),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        stored_dtype=stored_dtype,
        qk_norm=family == "qwen3",
        qkv_bias=bias,
        o_bias=bias and family != "qwen2",
        mlp_bias=family == "llama" and bool(raw.get("mlp_bias", False)),
    )


def _window(raw: Mapping[str, Any], family: str) -> int | None:
    """Return the sliding window that caps the context on a worker."""
    if family == "llama":
        return None
    if family == "mistral":  # absence means the family's default, null means none
        return 4096 if "sliding_window" not in raw else raw["sliding_window"] and _count(raw, "sliding_window")
    if not raw.get("use_sliding_window", False) or raw.get("sliding_window", 4096) is None:
        return None
    window = _count(raw, "sliding_window") if "sliding_window" in raw else 4096
    kinds = raw.get("layer_types")
    if kinds is not None:
        return window if "sliding_attention" in kinds else None
    return window if raw.get("max_window_layers", 28) < _count(raw, "num_hidden_layers") else None


def _stored_dtype(folder: Path, raw: Mapping[str, Any]) -> str:
    """Return what the weights are stored in: as the files say, else as the config does, else bfloat16."""
    names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    try:
        for file in weight_files(folder):
            tensors = read_header(file, max_header_bytes=MAX_HEADER_BYTES).tensors
            if "model.embed_tokens.weight" in tensors:
                return names.get(tensors["model.embed_tokens.weight"].dtype, "bfloat16")
    except (InvalidBaseModel, OSError):
        pass  # a folder with a config alone is enough to plan with
    said = raw.get("dtype") or raw.get("torch_dtype")
    return said if isinstance(said, str) and said in DTYPE_BYTES else "bfloat16"


def check_targets(targets: Iterable[str]) -> tuple[str, ...]:
    """Return the linears of those names, in the worker's order; "all-linear" is all. Raises InvalidParameter."""
    wanted: set[str] = set()
    for target in targets:
        if target == "all-linear":
            wanted.update(MODULES)
        elif target in TARGETS:
            wanted.add(TARGETS[target])
        else:
            raise InvalidParameter(
                f"--target-modules: {target!r} is not known; give some of {', '.join(TARGETS)}, or all-linear",
                field="target_modules",
            )
    if not wanted:
        raise InvalidParameter("--target-modules is empty; give one name at least", field="target_modules")
    return tuple(name for name in MODULES if name in wanted)


def _count(raw: Mapping[str, Any], field: str) -> int:
    value = raw.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidBaseModel(f"config.json: {field} must be a positive integer, not {value!r:.40}", field=field)
    return value
