"""The fields of an adapter_config.json: which are read, which do not matter, which are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from common.wording import shown
from loraplex.errors import UnsupportedAdapter
from loraplex.peft_folder import CONFIG_FILE

# Used in training, for initialisation, or to find the base; the maths at inference is the same whatever they say.
IGNORED: Final = frozenset(
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
# Read by `config`.
USED: Final = frozenset(
    {
        "alpha_pattern",
        "bias",
        "exclude_modules",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_bias",
        "modules_to_save",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "use_dora",
        "use_rslora",
    }
)
# Change the maths and are not served.
REFUSED: Final = {
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow routing",
    "ensure_weight_tying": "tied adapters",
    "fan_in_fan_out": "transposed weights",
    "kasa_config": "KaSA",
    "layer_replication": "replicated layers",
    "megatron_config": "Megatron layers",
    "monteclora_config": "Monte Carlo LoRA",
    "target_parameters": "adapters on bare parameters",
    "trainable_token_indices": "trained token embeddings",
    "use_bdlora": "block-diagonal LoRA",
    "use_qalora": "QALoRA",
    "velora_config": "VeLoRA",
}
# Ways to initialise that leave the base weights as they are. Unlike these, PiSSA, OLoRA, CorDA and LoRA-GA take what
# they start with out of the base, and LoftQ quantizes it: such an adapter belongs to the weights that remained.
_PLAIN_INITS: Final = (True, False, None, "gaussian", "orthogonal", "eva", "mica")


def refuse_unsupported(fields: Mapping[str, Any]) -> None:
    """Raise UnsupportedAdapter where a field asks for what is not served; metadata `field` names it."""
    for name, value in fields.items():
        if name in REFUSED and value:
            raise UnsupportedAdapter(
                f"{CONFIG_FILE}: {name} is {shown(value)}; {REFUSED[name]} cannot be served", field=name
            )
        if value and name not in IGNORED | USED | REFUSED.keys():
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
        remedy = (
            "save the quantized base model too, register that, and set init_lora_weights to true"
            if init == "loftq"
            else "export it as a plain LoRA with save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )
        raise UnsupportedAdapter(
            f"{CONFIG_FILE}: init_lora_weights is {shown(init)}, which changes the base weights it was trained on; "
            f"{remedy}",
            field="init_lora_weights",
        )
