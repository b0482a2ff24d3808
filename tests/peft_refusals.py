"""Adapters that the real PEFT makes and that cannot be served right, with the field of the config that says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from peft import (
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptTuningConfig,
    XLoraConfig,
    get_peft_model,
)
from peft.tuners.lora.config import KasaConfig

from tests.peft_variants import quietly_loaded, train

_TARGETS: Final = ["q_proj", "v_proj"]
_Make = Callable[[Any], PeftModel]


def _lora(**fields: Any) -> _Make:
    config = {"r": 4, "lora_alpha": 8, "target_modules": _TARGETS, **fields}
    return lambda base: get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **config))


def _loftq(base: Any) -> PeftModel:
    """PEFT's own LoftQ needs scipy; of it only the config matters here."""
    model = _lora()(base)
    config: Any = model.peft_config["default"]
    config.init_lora_weights, config.loftq_config = "loftq", {"loftq_bits": 4, "loftq_iter": 1}
    return model


def _other(config: Any) -> _Make:
    return lambda base: get_peft_model(base, config)


def _xlora(base: Any, folder: Path) -> PeftModel:
    config = XLoraConfig(
        task_type="CAUSAL_LM", hidden_size=base.config.hidden_size, xlora_depth=1, adapters={"0": str(folder)}
    )
    base.config.use_cache = False
    return get_peft_model(base, config)


REFUSALS: Final[Mapping[str, tuple[_Make, str]]] = {
    "loha": (_other(LoHaConfig(task_type="CAUSAL_LM", target_modules=_TARGETS)), "peft_type"),
    "lokr": (_other(LoKrConfig(task_type="CAUSAL_LM", target_modules=_TARGETS)), "peft_type"),
    "ia3": (
        _other(IA3Config(task_type="CAUSAL_LM", target_modules=_TARGETS, feedforward_modules=[])),
        "peft_type",
    ),
    "prompt_tuning": (_other(PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)), "peft_type"),
    "prefix_tuning": (_other(PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)), "peft_type"),
    "alora": (_lora(alora_invocation_tokens=[5, 6]), "alora_invocation_tokens"),
    "bias_all": (_lora(bias="all"), "bias"),
    "bias_lora_only": (_lora(bias="lora_only"), "bias"),
    "trained_tokens": (_lora(trainable_token_indices=[3, 5]), "trainable_token_indices"),
    "target_parameters": (
        _lora(target_modules=[], target_parameters=["self_attn.q_proj.weight"]),
        "target_parameters",
    ),
    "layer_replication": (_lora(layer_replication=[[0, 2], [1, 2]]), "layer_replication"),
    "kasa": (_lora(kasa_config=KasaConfig()), "kasa_config"),
    "pissa": (_lora(init_lora_weights="pissa"), "init_lora_weights"),
    "olora": (_lora(init_lora_weights="olora"), "init_lora_weights"),
    "loftq": (_loftq, "init_lora_weights"),
    "tied_saved": (_lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True), "ensure_weight_tying"),
    "saved_norm": (_lora(modules_to_save=["input_layernorm"]), "modules_to_save"),
    "saved_linear": (_lora(modules_to_save=["o_proj"]), "modules_to_save"),
}


def make_refusal(name: str, base_folder: Path, folder: Path) -> Path:
    """Make the adapter REFUSALS[name] and save it as PEFT does; return `folder`."""
    with quietly_loaded(base_folder) as base:
        torch.manual_seed(3)
        model = REFUSALS[name][0](base)
        train(model)
        model.save_pretrained(str(folder))
    return folder


def make_xlora(base_folder: Path, lora_folder: Path, folder: Path) -> Path:
    """Make an X-LoRA of one LoRA and save it as PEFT does; return `folder`."""
    with quietly_loaded(base_folder) as base:
        _xlora(base, lora_folder).save_pretrained(str(folder))
    return folder
