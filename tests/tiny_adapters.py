"""Small random adapters as PEFT writes them: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loraplex.manifest import MAX_HEADER_BYTES
from loraplex.safetensors_header import read_header
from tests.tiny_base import float_bits, write_safetensors

ALL_SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."


def base_modules(base_folder: Path) -> dict[str, tuple[int, int]]:
    """Return {"model.layers.0.self_attn.q_proj": (out, in)} of the seven linears, in layer order."""
    header = read_header(base_folder / "model.safetensors", max_header_bytes=MAX_HEADER_BYTES)
    found = {}
    for name, entry in header.tensors.items():
        match = re.fullmatch(r"(model\.layers\.\d+\.(?:self_attn|mlp)\.(\w+))\.weight", name)
        if match and match[2] in ALL_SEVEN:
            found[match[1]] = (entry.shape[0], entry.shape[1])
    return dict(sorted(found.items(), key=lambda item: (int(item[0].split(".")[2]), item[0])))


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def adapter_tensors(
    base_folder: Path,
    *,
    rank: int = 4,
    targets: Iterable[str] = ALL_SEVEN,
    layers: Iterable[int] | None = None,
    dtype: str = "F32",
    seed: int = 0,
    rank_pattern: Mapping[str, int] | None = None,
    strength: float = 0.5,
) -> dict[str, tuple[str, NDArray[Any]]]:
    """Return the tensors of a random adapter by PEFT's names; `strength` is about |BAx| / |Wx| at a scale of 1."""
    rng = np.random.default_rng(seed)
    wanted, only = set(targets), None if layers is None else set(layers)
    tensors: dict[str, tuple[str, NDArray[Any]]] = {}
    for module, (out, inner) in base_modules(base_folder).items():
        if module.rsplit(".", 1)[1] not in wanted or (only is not None and int(module.split(".")[2]) not in only):
            continue
        r = _by_pattern(rank_pattern, module, rank)
        a = rng.standard_normal((r, inner), dtype=np.float32) / np.float32(np.sqrt(inner))
        b = rng.standard_normal((out, r), dtype=np.float32) * np.float32(strength / np.sqrt(r))
        tensors[f"{PREFIX}{module}.lora_A.weight"] = (dtype, float_bits(a, dtype))
        tensors[f"{PREFIX}{module}.lora_B.weight"] = (dtype, float_bits(b, dtype))
    return tensors


def adapter_config(**fields: Any) -> dict[str, Any]:
    """Return an adapter_config.json with the fields PEFT always writes, changed by `fields`."""
    return {
        "alpha_pattern": {},
        "auto_mapping": None,
        "base_model_name_or_path": "tiny",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layer_replication": None,
        "layers_pattern": None,
        "layers_to_transform": None,
        "loftq_config": {},
        "lora_alpha": 8,
        "lora_bias": False,
        "lora_dropout": 0.05,
        "megatron_config": None,
        "megatron_core": "megatron.core",
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": 4,
        "rank_pattern": {},
        "revision": None,
        "target_modules": sorted(ALL_SEVEN),
        "task_type": "CAUSAL_LM",
        "trainable_token_indices": None,
        "use_dora": False,
        "use_rslora": False,
        **fields,
    }


def write_adapter(
    folder: Path,
    base_folder: Path,
    *,
    rank: int = 4,
    alpha: float = 8,
    targets: Iterable[str] = ALL_SEVEN,
    layers: Iterable[int] | None = None,
    dtype: str = "F32",
    seed: int = 0,
    rslora: bool = False,
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, float] | None = None,
    strength: float = 0.5,
    **config_fields: Any,
) -> Path:
    """Write a random adapter for the base in `base_folder` into `folder` (made if absent) and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    targets = tuple(targets)
    layers = None if layers is None else sorted(layers)
    config = adapter_config(
        **{
            "r": rank,
            "lora_alpha": alpha,
            "target_modules": sorted(targets),
            "layers_to_transform": layers,
            "use_rslora": rslora,
            "rank_pattern": dict(rank_pattern or {}),
            "alpha_pattern": dict(alpha_pattern or {}),
            **config_fields,
        }
    )
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))
    tensors = adapter_tensors(
        base_folder,
        rank=rank,
        targets=targets,
        layers=layers,
        dtype=dtype,
        seed=seed,
        rank_pattern=rank_pattern,
        strength=strength,
    )
    write_safetensors(folder / "adapter_model.safetensors", tensors, metadata={"format": "pt"})
    return folder
