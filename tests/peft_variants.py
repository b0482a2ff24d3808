"""Adapters of every kind, made by the real PEFT on tiny bases, and the logits that PEFT itself computes with them.

`VARIANTS` are served; `peft_refusals` has those that are not. Each is made on a base of its own kind (`write_base`).
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from peft import EvaConfig, LoraConfig, PeftModel, get_peft_model, initialize_lora_eva_weights
from peft.tuners.lora.config import CordaConfig
from peft.tuners.lora.corda import preprocess_corda
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.tiny_base import write_tiny_base

VOCAB: Final = 304
"""A multiple of 16, so that adapters of the output head can be quantized."""
BASES: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "biased": {"architecture": "Qwen2ForCausalLM"},
    "bf16": {"dtype": "BF16"},
}
SEVEN: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPTS: Final = ((5, 17, 44, 120, 7, 260, 33, 9), (11, 11, 200, 3, 90, 61))
_UNTOUCHED: Final = "as_peft_wrote_it"
_AdapterTensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Variant:
    """How PEFT is asked for an adapter: fields of LoraConfig, and what happens to the file afterwards."""

    config: Mapping[str, Any] = field(default_factory=dict)
    base: str = "llama"
    """Key of BASES."""
    dtype: torch.dtype = torch.float32
    """Of the stored tensors."""
    converted: bool = False
    """Trained on a changed base and exported as a difference, as PiSSA and its kind can be."""
    copies: bool = False
    """Saved with the embedding and the head of the base, as `save_embedding_layers=True` does."""
    renamed: Callable[[str], str] | None = None
    """Spelling of the names in the file, where it is not what this PEFT writes."""

    def lora_config(self) -> LoraConfig:
        """Return the config."""
        fields = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], **self.config}
        return LoraConfig(task_type="CAUSAL_LM", **fields)


VARIANTS: Final[Mapping[str, Variant]] = {
    "plain": Variant({"target_modules": list(SEVEN)}),
    "mixed_ranks": Variant(
        {
            "target_modules": list(SEVEN),
            "rank_pattern": {"q_proj": 8, r"layers\.1\.mlp\.up_proj": 3},
            "alpha_pattern": {"v_proj": 3, "layers.0.mlp.down_proj": 16.5},
        }
    ),
    "rslora": Variant({"use_rslora": True, "rank_pattern": {"v_proj": 9}}),
    "some_layers": Variant({"layers_to_transform": [1], "layers_pattern": "layers"}),
    "one_layer": Variant({"layers_to_transform": 0}),
    "regex": Variant({"target_modules": r".*\.(0\.self_attn\.[qk]_proj|1\.mlp\.(up|gate)_proj)"}),
    "all_linear": Variant({"target_modules": "all-linear"}),
    "excluded": Variant({"target_modules": "all-linear", "exclude_modules": ["layers.0.mlp.up_proj", "o_proj"]}),
    "excluded_regex": Variant({"target_modules": list(SEVEN), "exclude_modules": r".*\.1\..*"}),
    "fp16": Variant(dtype=torch.float16),
    "bf16": Variant(dtype=torch.bfloat16),
    "bf16_base": Variant(base="bf16"),
    "attention_bias": Variant({"target_modules": list(SEVEN)}, base="biased"),
    "dora": Variant({"use_dora": True, "target_modules": list(SEVEN)}),
    "dora_biased": Variant({"use_dora": True, "target_modules": list(SEVEN)}, base="biased"),
    "dora_rslora": Variant({"use_dora": True, "use_rslora": True, "rank_pattern": {"q_proj": 2}}),
    "dora_bf16": Variant({"use_dora": True}, base="bf16", dtype=torch.bfloat16),
    "dora_weight_suffix": Variant(
        {"use_dora": True},
        renamed=lambda name: f"{name}.weight" if name.endswith("lora_magnitude_vector") else name,
    ),
    "lora_bias": Variant({"lora_bias": True}),
    "lora_bias_biased": Variant({"lora_bias": True, "use_rslora": True}, base="biased"),
    "embedding": Variant({"target_modules": ["q_proj", "embed_tokens"]}),
    "embedding_alone": Variant({"target_modules": ["embed_tokens"]}),
    "embedding_bf16": Variant({"target_modules": ["q_proj", "embed_tokens"]}, dtype=torch.bfloat16),
    "embedding_regex": Variant({"target_modules": r".*(embed_tokens|\.0\.self_attn\.q_proj)", "use_rslora": True}),
    "embedding_tied": Variant({"target_modules": ["v_proj", "embed_tokens"]}, base="tied"),
    "embedding_dora": Variant({"target_modules": ["v_proj", "embed_tokens"], "use_dora": True}),
    "head": Variant({"target_modules": ["up_proj", "lm_head"]}),
    "head_and_one_layer": Variant({"target_modules": ["q_proj", "lm_head"], "layers_to_transform": [1]}),
    "head_tied": Variant({"target_modules": ["up_proj", "lm_head"]}, base="tied"),
    "head_dora": Variant({"target_modules": ["lm_head"], "use_dora": True}),
    "head_dora_tied": Variant({"target_modules": ["q_proj", "lm_head"], "use_dora": True}, base="tied"),
    "head_bias": Variant({"target_modules": ["q_proj", "lm_head"], "lora_bias": True}),
    "embedding_and_head": Variant(
        {"target_modules": ["k_proj", "embed_tokens", "lm_head"], "rank_pattern": {"lm_head": 6, "embed_tokens": 3}}
    ),
    "embedding_and_head_tied": Variant({"target_modules": ["k_proj", "embed_tokens", "lm_head"]}, base="tied"),
    "saved_head": Variant({"modules_to_save": ["lm_head"]}),
    "saved_head_tied": Variant({"modules_to_save": ["lm_head"]}, base="tied"),
    "saved_embedding": Variant({"modules_to_save": ["embed_tokens"]}),
    "saved_embedding_tied": Variant({"modules_to_save": ["embed_tokens"]}, base="tied"),
    "saved_both": Variant({"modules_to_save": ["embed_tokens", "lm_head"], "use_dora": True}),
    "saved_both_bf16": Variant({"modules_to_save": ["embed_tokens", "lm_head"]}, base="bf16", dtype=torch.bfloat16),
    "saved_head_lora_embedding": Variant(
        {"modules_to_save": ["lm_head"], "target_modules": ["q_proj", "embed_tokens"]}, base="tied"
    ),
    "gaussian": Variant({"init_lora_weights": "gaussian"}),
    "mica": Variant({"init_lora_weights": "mica", "target_modules": ["q_proj", "embed_tokens"]}),
    "orthogonal": Variant({"init_lora_weights": "orthogonal"}),
    "eva": Variant({"init_lora_weights": "eva", "eva_config": EvaConfig(rho=2.0)}),
    "pissa_converted": Variant({"init_lora_weights": "pissa"}, converted=True),
    "pissa_niter_converted": Variant(
        {"init_lora_weights": "pissa_niter_4", "rank_pattern": {"q_proj": 6}, "alpha_pattern": {"q_proj": 3}},
        converted=True,
    ),
    "olora_converted": Variant({"init_lora_weights": "olora", "use_rslora": True}, converted=True),
    "corda_converted": Variant({"init_lora_weights": "corda", "corda_config": CordaConfig()}, converted=True),
    "copies": Variant(copies=True),
    "copies_tied": Variant({"use_dora": True}, base="tied", copies=True),
    "copies_bf16_base": Variant(base="bf16", dtype=torch.bfloat16, copies=True),
    "adapter_name_in_keys": Variant(
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "use_dora": True},
        renamed=lambda name: _named(name, "my-adapter"),
    ),
    "bare_keys": Variant(
        {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]},
        renamed=lambda name: name.removeprefix("base_model.model."),
    ),
}


def write_base(kind: str, folder: Path) -> Path:
    """Write the tiny base of a kind (key of BASES) and return its folder."""
    return write_tiny_base(folder, vocab=VOCAB, **BASES[kind])


def load_base(folder: Path) -> Any:
    """Return the base in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def make_variant(name: str, base_folder: Path, folder: Path) -> Path:
    """Make the adapter VARIANTS[name], trained on random numbers, and save it as PEFT does; return `folder`."""
    variant = VARIANTS[name]
    with _quiet():
        torch.manual_seed(sum(map(ord, name)))
        if variant.converted:
            _make_converted(variant, base_folder, folder)
        else:
            model = get_peft_model(load_base(base_folder), variant.lora_config())
            if variant.config.get("init_lora_weights") == "eva":
                initialize_lora_eva_weights(model, _batches(), show_progress_bar=False)
            train(model, variant.dtype)
            model.save_pretrained(str(folder), save_embedding_layers=variant.copies or "auto")
    if variant.renamed is not None:
        shutil.copytree(folder, folder / _UNTOUCHED)
        tensors = load_file(folder / "adapter_model.safetensors")
        renamed = {variant.renamed(key): tensor for key, tensor in tensors.items()}
        save_file(renamed, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def train(model: PeftModel, dtype: torch.dtype = torch.float32) -> None:
    """Give all that is trained random values of sensible sizes, in `dtype`."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name or "lora_embedding_B" in name:
                parameter.normal_(0, parameter.shape[1] ** -0.5)
            elif "lora_B" in name and name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif "lora_B" in name:
                parameter.normal_(0, 0.3 * parameter.shape[1] ** -0.5)
            elif "lora_embedding_A" in name:
                parameter.normal_(0, 0.6)
            elif "lora_magnitude_vector" in name:
                parameter.mul_(1 + 0.4 * (torch.rand_like(parameter) - 0.5))
            elif "modules_to_save" in name:
                parameter.add_(0.3 * parameter.std() * torch.randn_like(parameter))
            else:
                continue
            parameter.data = parameter.data.to(dtype)


def peft_logits(base_folder: Path, folder: Path, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[NDArray[Any]]:
    """Return what PEFT computes in float32 with the base and the adapter as they are on disk: [tokens, VOCAB] each."""
    return model_logits(peft_model(base_folder, folder), prompts)


def peft_model(base_folder: Path, folder: Path) -> PeftModel:
    """Return the base in float32 with the adapter, as PEFT loads them from the disk."""
    untouched = folder / _UNTOUCHED
    with _quiet():
        model = PeftModel.from_pretrained(load_base(base_folder), str(untouched if untouched.exists() else folder))
    return model.eval()


def model_logits(model: Any, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[NDArray[np.float32]]:
    """Return a model's logits for each prompt."""
    with torch.no_grad():
        return [model(torch.tensor([list(prompt)])).logits[0].float().numpy() for prompt in prompts]


def _make_converted(variant: Variant, base_folder: Path, folder: Path) -> None:
    base, config = load_base(base_folder), variant.lora_config()
    if config.init_lora_weights == "corda":
        batches = _batches(1)

        def run() -> None:
            for batch in batches:
                base(**batch)

        preprocess_corda(base, config, run_model=run)
    model = get_peft_model(base, config)
    initial = folder.parent / f"{folder.name}-initial"
    method, config.init_lora_weights = config.init_lora_weights, True  # what PEFT asks of the initial adapter
    model.save_pretrained(str(initial))
    config.init_lora_weights = method
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.2 * parameter.std() * torch.randn_like(parameter))
    model.save_pretrained(str(folder), path_initial_model_for_weight_conversion=str(initial))


def _batches(size: int = 4) -> list[dict[str, torch.Tensor]]:
    return [
        {"input_ids": torch.randint(4, VOCAB, (size, 24)), "attention_mask": torch.ones(size, 24, dtype=torch.long)}
        for _ in range(6)
    ]


def _named(name: str, adapter: str) -> str:
    """Put an adapter's name where PEFT keeps it in a model's own state."""
    for factor in ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector"):
        stem, found, suffix = name.partition(f".{factor}")
        if found and suffix in ("", ".weight"):
            return f"{stem}.{factor}.{adapter}{suffix}"
    return name


@contextmanager
def quietly_loaded(base_folder: Path) -> Iterator[Any]:
    """Lend the base in float32 while PEFT's warnings are off."""
    with _quiet():
        yield load_base(base_folder)


@contextmanager
def _quiet() -> Iterator[None]:
    """PEFT warns of all that is unusual, which is what is made here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def read_config(folder: Path) -> dict[str, Any]:
    """Return the adapter_config.json of a folder."""
    config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    return config
