"""A tiny GGUF and a wheel around it for tests without a network; the real demo base for those marked `demo_base`."""

import hashlib
import os
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest

from examples import demo_base as demo

HIDDEN, HEADS, KV_HEADS, HIDDEN_MLP, LAYERS = 64, 4, 2, 96, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"


def write_tiny_gguf(path: Path, *, architecture: str = "llama", pre_tokenizer: str = "smollm") -> None:
    """Write a Llama of two layers as llama.cpp's converter does, quantized like the demo base."""
    alphabet = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
    tokens = [*SPECIAL, *alphabet, "Ġt", "he", "Ġthe"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(HIDDEN_MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges(["Ġ t", "h e", "Ġt he"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    rng = np.random.default_rng(3)

    def add(name: str, *shape: int, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q4_1) -> None:
        values = rng.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", len(tokens), HIDDEN, kind=gguf.GGMLQuantizationType.Q8_0)
    add("output_norm.weight", HIDDEN)
    head_dim = HIDDEN // HEADS
    for layer in range(LAYERS):
        add(f"blk.{layer}.attn_norm.weight", HIDDEN)
        add(f"blk.{layer}.ffn_norm.weight", HIDDEN)
        add(f"blk.{layer}.attn_q.weight", HIDDEN, HIDDEN)
        add(f"blk.{layer}.attn_k.weight", KV_HEADS * head_dim, HIDDEN)
        add(f"blk.{layer}.attn_v.weight", KV_HEADS * head_dim, HIDDEN)
        add(f"blk.{layer}.attn_output.weight", HIDDEN, HIDDEN)
        add(f"blk.{layer}.ffn_gate.weight", HIDDEN_MLP, HIDDEN)
        add(f"blk.{layer}.ffn_up.weight", HIDDEN_MLP, HIDDEN)
        add(f"blk.{layer}.ffn_down.weight", HIDDEN, HIDDEN_MLP)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny_gguf(path)
    return path


@pytest.fixture
def tiny_wheel(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with the tiny model inside; for the time of a test it is the one that is expected."""
    path = tmp_path / "wheelhouse" / demo.WHEEL
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tiny_gguf, demo.MEMBER)
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.delenv(demo.WHEEL_VARIABLE, raising=False)
    return path


@pytest.fixture(scope="session")
def demo_base() -> Path:
    """The folder of the real demo base, fetched on first use."""
    return demo.ensure_demo_base()


@pytest.fixture(scope="session")
def demo_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF that the demo base is made from; its wheel is fetched again, since only the folder is cached."""
    folder = tmp_path_factory.mktemp("demo-gguf")
    configured = os.environ.get(demo.WHEEL_VARIABLE)
    wheel = Path(configured) if configured else demo.download(folder)
    demo.verify(wheel)
    return demo.extract(wheel, folder)
