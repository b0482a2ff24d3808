from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from loraplex.errors import InvalidBaseModel
from worker.model.config import parse_config, read_config, read_eos_token_ids

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
QWEN3 = {**LLAMA, "model_type": "qwen3"}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model_type": "mixtral"}, "model_type"),
        ({"model_type": None}, "model_type"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "architectures"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "auto_map"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_parameters"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "rope_scaling.factor"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "hidden_size"),
        ({"head_dim": 15}, "head_dim"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidBaseModel) as caught:
        parse_config({**LLAMA, **change})
    assert caught.value.field == field
    assert field.rsplit(".", maxsplit=1)[-1] in caught.value.message or "rope type" in caught.value.message


@pytest.mark.parametrize("field", [key for key in LLAMA if key not in ("model_type", "num_key_value_heads")])
def test_a_missing_size_is_named(field: str) -> None:
    with pytest.raises(InvalidBaseModel) as caught:
        parse_config({key: value for key, value in LLAMA.items() if key != field})
    assert caught.value.field == field


@pytest.mark.parametrize(
    "harmless",
    [
        {"pretraining_tp": 1, "use_cache": True, "torch_dtype": "bfloat16", "is_llama_config": True},
        {"rope_interleaved": False, "quantization_config": None, "num_experts": 0, "partial_rotary_factor": 1.0},
        {"auto_map": {"AutoTokenizer": "x"}, "rope_scaling": {}},
    ],
)
def test_fields_that_change_nothing_are_ignored(harmless: dict[str, Any]) -> None:
    assert parse_config({**LLAMA, **harmless}) == parse_config(LLAMA)


@pytest.mark.parametrize(
    ("raw", "context"),
    [
        (LLAMA, 512),
        ({**LLAMA, "sliding_window": 64}, 512),  # the llama code does not read it
        ({**LLAMA, "model_type": "mistral", "sliding_window": 64}, 64),
        ({**LLAMA, "model_type": "mistral", "sliding_window": None}, 512),
        ({**LLAMA, "model_type": "mistral", "max_position_embeddings": 32768}, 4096),  # its default window
        ({**QWEN3, "sliding_window": 64}, 512),
        ({**QWEN3, "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2}, 512),
        ({**QWEN3, "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, 64),
        ({**QWEN3, "sliding_window": 64, "use_sliding_window": True, "layer_types": ["full_attention"] * 2}, 512),
        ({**QWEN3, "sliding_window": 64, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}, 64),
    ],
)
def test_a_sliding_window_caps_the_context(raw: dict[str, Any], context: int) -> None:
    assert parse_config(raw).max_context_tokens == context


@pytest.mark.parametrize(
    ("parameters", "theta"),
    [
        ({"rope_type": "default"}, 10000.0),
        ({"rope_type": "linear", "factor": 2.5}, 1e6),
        (
            {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            500000.0,
        ),
    ],
)
def test_rotary_frequencies_equal_transformers_bit_for_bit(parameters: dict[str, Any], theta: float) -> None:
    raw = {**LLAMA, "head_dim": 128, "rope_theta": theta, "rope_scaling": parameters}
    config = transformers.LlamaConfig(head_dim=128, rope_parameters={**parameters, "rope_theta": theta})
    if parameters["rope_type"] == "default":
        rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
        expected, _ = rotary.compute_default_rope_parameters(config)
    else:
        expected, _ = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    assert torch.equal(parse_config(raw).rope.inverse_frequencies(), expected)


def test_qwen3_has_a_default_head_dim_of_its_own() -> None:
    assert parse_config(QWEN3).head_dim == 128
    assert parse_config(LLAMA).head_dim == 16


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [2, 7]}, {"eos_token_id": 1}, {2, 7}),
        ({}, {"eos_token_id": 1}, {1}),
        (None, {"eos_token_id": 1}, {1}),
        (None, {}, set()),
    ],
)
def test_end_of_sequence_comes_from_the_generation_config_first(
    generation: dict[str, Any] | None, config: dict[str, Any], expected: set[int], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_eos_token_ids(tmp_path) == expected


@pytest.mark.parametrize("text", ["{", "[]", None])
def test_an_unreadable_config_is_a_typed_error(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidBaseModel, match=r"config\.json"):
        read_config(tmp_path)
