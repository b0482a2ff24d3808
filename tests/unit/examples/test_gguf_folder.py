import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from examples.gguf_folder import (
    Gguf,
    UnsupportedGgufError,
    hugging_face_name,
    to_bfloat16,
    undo_rope_permutation,
    write_folder,
)

from .conftest import CHAT_TEMPLATE, HEADS, HIDDEN, KV_HEADS, LAYERS, write_tiny_gguf


@pytest.fixture
def folder(tiny_gguf: Path, tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    write_folder(Gguf.open(tiny_gguf), path, "acme/tiny", lambda _done, _total: None)
    return path


@pytest.mark.parametrize(
    ("llama_cpp", "hugging_face"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("blk.12.ffn_down.weight", "model.layers.12.mlp.down_proj.weight"),
        ("blk.3.ffn_norm.weight", "model.layers.3.post_attention_layernorm.weight"),
    ],
)
def test_tensor_names_are_translated(llama_cpp: str, hugging_face: str) -> None:
    assert hugging_face_name(llama_cpp) == hugging_face


@pytest.mark.parametrize("name", ["rope_freqs.weight", "blk.0.ffn_gate_exps.weight", "blk.weight"])
def test_a_tensor_without_a_place_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedGgufError, match=name):
        hugging_face_name(name)


def test_the_rope_permutation_of_llama_cpp_is_undone() -> None:
    heads, head_dim, columns = 3, 8, 5
    weights = np.arange(heads * head_dim * columns, dtype=np.float32).reshape(-1, columns)
    # convert_hf_to_gguf: rows [half, pair] of a head become [pair, half]
    permuted = weights.reshape(heads, 2, head_dim // 2, columns).swapaxes(1, 2).reshape(weights.shape)
    assert not np.array_equal(permuted, weights)
    assert np.array_equal(undo_rope_permutation(permuted, heads), weights)


def test_bfloat16_rounds_to_nearest_and_ties_to_even_as_torch_does() -> None:
    rng = np.random.default_rng(0)
    ties = (rng.integers(0, 1 << 15, 1000, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    ties = ties[np.isfinite(ties)]
    values = np.concatenate(
        [rng.standard_normal(10_000).astype(np.float32), ties, np.array([0.0, -0.0, 1.0], dtype=np.float32)]
    )
    expected = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(to_bfloat16(values), expected)


def test_weights_are_bfloat16_of_the_right_shapes(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    assert len(weights) == 2 + 9 * LAYERS
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    kv_rows = KV_HEADS * HIDDEN // HEADS
    assert weights["model.layers.1.self_attn.k_proj.weight"].shape == (kv_rows, HIDDEN)
    assert "lm_head.weight" not in weights


def test_config_has_what_the_gguf_says(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 2, 16)
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-5, 100000.0)
    assert (config["bos_token_id"], config["eos_token_id"], config["tie_word_embeddings"]) == (1, 2, True)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
    assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] == CHAT_TEMPLATE


def test_tokenizer_merges_splits_digits_and_knows_its_special_tokens(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("a the").tokens == ["a", "Ġthe"]
    assert tokenizer.encode("x12 34").tokens == ["x", "1", "2", "Ġ", "3", "4"]
    assert tokenizer.encode("hi<|im_end|>").tokens == ["h", "i", "<|im_end|>"]
    ids = tokenizer.encode("over the <|im_start|> 42").ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == "over the <|im_start|> 42"


def test_the_same_gguf_gives_the_same_bytes(tiny_gguf: Path, folder: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    again.mkdir()
    write_folder(Gguf.open(tiny_gguf), again, "acme/tiny", lambda _done, _total: None)
    for path in folder.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes()


def test_progress_counts_every_tensor(tiny_gguf: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    write_folder(Gguf.open(tiny_gguf), tmp_path, "acme/tiny", lambda done, total: seen.append((done, total)))
    assert seen == [(done, 20) for done in range(1, 21)]


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "other.gguf", architecture="gemma")
    with pytest.raises(UnsupportedGgufError, match=r"general\.architecture is 'gemma'"):
        Gguf.open(tmp_path / "other.gguf")


def test_an_unknown_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "other.gguf", pre_tokenizer="qwen2")
    with pytest.raises(UnsupportedGgufError, match="qwen2"):
        write_folder(Gguf.open(tmp_path / "other.gguf"), tmp_path, "acme/tiny", lambda _done, _total: None)
