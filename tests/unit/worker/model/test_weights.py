from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from loraplex.errors import CorruptArtifact, InvalidBaseModel
from tests.unit.worker.model.tiny import make_model, save_model
from worker.model.config import read_config
from worker.model.weights import ModelWeights, load_weights, stores_bfloat16

Change = Callable[[dict[str, Tensor]], object]


def load(folder: Path) -> ModelWeights:
    return load_weights(folder, read_config(folder), device=torch.device("cpu"), dtype=torch.float32)


@pytest.mark.parametrize(
    ("change", "tensor"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "model.layers.1.mlp.up_proj.weight"),
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight"),
        (
            lambda t: t.update({"model.layers.0.self_attn.k_proj.weight": torch.zeros(64, 64)}),
            "model.layers.0.self_attn.k_proj.weight",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int64)}),
            "model.norm.weight",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}),
            "model.layers.0.self_attn.q_proj.bias",
        ),
        (
            lambda t: t.update({"model.layers.2.input_layernorm.weight": torch.ones(64)}),
            "model.layers.2.input_layernorm.weight",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(change: Change, tensor: str, llama_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama_folder, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InvalidBaseModel) as caught:
        load(folder)
    assert caught.value.metadata["tensor"] == tensor
    assert tensor in caught.value.message


def test_a_truncated_file_is_named(llama_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama_folder, tmp_path / "model")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CorruptArtifact, match=r"model\.safetensors"):
        load(folder)


def test_weights_outlive_the_file(llama_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama_folder, tmp_path / "model")
    weights = load(folder)
    before = weights.embedding.weight.clone()
    with (folder / "model.safetensors").open("r+b") as stream:
        stream.write(b"\0" * (folder / "model.safetensors").stat().st_size)
    assert torch.equal(weights.embedding.weight, before)


def test_a_tied_head_is_the_embedding_even_where_the_file_stores_it_twice(tmp_path: Path) -> None:
    folder = save_model(make_model("llama_tied"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, folder / "model.safetensors")
    weights = load(folder)
    assert weights.lm_head is weights.embedding


def test_untied_in_the_config_needs_a_head(tmp_path: Path) -> None:
    folder = save_model(make_model("llama_tied"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(InvalidBaseModel, match=r"lm_head\.weight is missing"):
        load(folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bases_dtype_is_read_from_its_embedding(dtype: str, tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": torch.zeros(4, 8, dtype=getattr(torch, dtype))}
    save_file({"a": torch.zeros(1)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file(tensors, tmp_path / "model-00002-of-00002.safetensors")
    files = {"a": "model-00001-of-00002.safetensors", "model.embed_tokens.weight": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert stores_bfloat16(tmp_path) == (dtype == "bfloat16")
