from __future__ import annotations

import json
from pathlib import Path

import pytest

from loraplex.errors import InvalidBaseModel, InvalidParameter
from loraplex.planning.shapes import SHAPES, check_targets, named_shape, shape_from_folder
from tests.unit.worker.model.tiny import VARIANTS, make_model, save_model
from worker.model.config import read_config

PUBLISHED = {
    "Llama-2-7B": 6_738_415_616,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Mistral-7B": 7_248_023_552,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-32B": 32_762_123_264,
    "SmolLM2-135M": 134_515_008,
    "SmolLM2-360M": 361_821_120,
    "SmolLM2-1.7B": 1_711_376_384,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_named_shapes_have_the_parameters_that_their_authors_count(name: str) -> None:
    assert SHAPES[name].num_parameters == PUBLISHED[name]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_folders_shape_is_what_its_worker_reads(variant: str, tmp_path: Path) -> None:
    model = make_model(variant)
    save_model(model, tmp_path)
    shape, config = shape_from_folder(tmp_path), read_config(tmp_path)
    assert shape.module_shapes() == config.module_shapes()
    assert (shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim) == (
        config.num_layers,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
    )
    assert (shape.vocab_size, shape.max_context_tokens) == (config.vocab_size, config.max_context_tokens)
    assert (shape.tied_embeddings, shape.qk_norm) == (config.tied_embeddings, config.qk_norm)
    assert (shape.qkv_bias, shape.o_bias, shape.mlp_bias) == (config.qkv_bias, config.o_bias, config.mlp_bias)
    assert shape.stored_dtype == "float32"
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_names_are_found_as_people_write_them() -> None:
    assert named_shape("meta-llama/Llama-3.1-8B-Instruct") is SHAPES["Llama-3.1-8B"]
    assert named_shape("qwen3-0.6b") is SHAPES["Qwen3-0.6B"]
    with pytest.raises(InvalidParameter, match=r"--model.*SmolLM2-135M"):
        named_shape("gpt-2")


def test_what_no_worker_serves_is_refused_by_field(tmp_path: Path) -> None:
    with pytest.raises(InvalidBaseModel, match="--base-dir"):
        shape_from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    with pytest.raises(InvalidBaseModel, match="model_type"):
        shape_from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": "64"}))
    with pytest.raises(InvalidBaseModel, match="num_attention_heads"):
        shape_from_folder(tmp_path)


def test_targets_come_in_the_workers_order_and_unknown_ones_are_named() -> None:
    assert check_targets(["down_proj", "q_proj"]) == ("self_attn.q_proj", "mlp.down_proj")
    assert len(check_targets(["all-linear"])) == 7
    with pytest.raises(InvalidParameter, match="--target-modules: 'c_attn'"):
        check_targets(["c_attn"])
