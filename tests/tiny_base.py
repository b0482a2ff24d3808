"""A tiny random base model as a Hugging Face folder: real files, a second to make, no torch.

The tokenizer is byte-level BPE that covers every byte, so that any text round-trips. Llama, Mistral, Qwen2 and Qwen3
shapes are had by `architecture`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

BOS, EOS, PAD, TURN = "<s>", "</s>", "<pad>", "<|turn|>"
SPECIALS = (BOS, EOS, PAD, TURN)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)

MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

# Frequent English pairs, as a real vocabulary has them ("Ġ" stands for a leading space).
_PAIRS = (
    "t h|i n|e r|a n|o n|r e|e n|e s|o r|t i|a t|a r|s t|e d|n d|a l|i s|o u|l e|i t|n g|s e|h e|i c|Ġ t|Ġ a|Ġ s|Ġ w"
    "|Ġ o|Ġ c|Ġ b|Ġ p|Ġ f|Ġ i|th e|in g|Ġ the|an d|Ġ in|Ġ and"
)


def float_bits(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Return `values` as F32, F16, or BF16 (uint16 bits, rounded to nearest even)."""
    if dtype == "F32":
        return values.astype("<f4")
    if dtype == "F16":
        return values.astype("<f2")
    bits = values.astype("<f4").view("<u4")
    rounded: NDArray[np.uint16] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return rounded


def write_safetensors(
    file: Path,
    tensors: Mapping[str, tuple[str, NDArray[Any]]],
    *,
    metadata: Mapping[str, str] | None = None,
    pad_header_to: int = 8,
) -> Path:
    """Write {name: (dtype, array)} in the mapping's order; BF16 arrays are uint16 bits."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata is not None else {}
    blobs, at = [], 0
    for name, (dtype, array) in tensors.items():
        blob = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + len(blob)]}
        blobs.append(blob)
        at += len(blob)
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % pad_header_to)
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + b"".join(blobs))
    return file


def write_tiny_tokenizer(folder: Path, vocab: int, *, add_bos: bool = False) -> Tokenizer:
    """Write tokenizer.json and tokenizer_config.json with at most `vocab` tokens (at least 260)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*SPECIALS, *alphabet]
    merges = [(left, right) for left, right in (pair.split(" ") for pair in _PAIRS.split("|"))]
    merges = merges[: vocab - len(pieces)]
    pieces += ["".join(merge) for merge in merges]
    model = models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    if add_bos:
        tokenizer.post_processor = TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, SPECIALS.index(BOS))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    return tokenizer


def write_tiny_base(
    folder: Path,
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 128,
    vocab: int = 300,
    seed: int = 0,
    dtype: str = "F32",
    architecture: str = "LlamaForCausalLM",
    add_bos: bool = False,
    **config_overrides: Any,
) -> Path:
    """Write a random base model into `folder` (made if absent) and return it.

    `config_overrides` go into config.json; `head_dim`, `tie_word_embeddings` and `attention_bias` also change the
    weights. `vocab` of 300 is exactly the tokenizer's size; a larger one leaves rows without a token.
    """
    folder.mkdir(parents=True, exist_ok=True)
    head_dim = config_overrides.get("head_dim") or hidden // heads
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": MODEL_TYPES.get(architecture, "llama"),
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": SPECIALS.index(BOS),
        "eos_token_id": SPECIALS.index(EOS),
        "pad_token_id": SPECIALS.index(PAD),
        "torch_dtype": {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[dtype],
        **config_overrides,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    write_tiny_tokenizer(folder, vocab, add_bos=add_bos)

    rng = np.random.default_rng(seed)
    tensors: dict[str, tuple[str, NDArray[Any]]] = {}

    def add(name: str, values: NDArray[np.float32]) -> None:
        tensors[name] = (dtype, float_bits(values, dtype))

    def linear(name: str, out: int, inner: int, *, bias: bool = False) -> None:
        add(f"{name}.weight", rng.standard_normal((out, inner), dtype=np.float32) / np.float32(np.sqrt(inner)))
        if bias:
            add(f"{name}.bias", rng.standard_normal(out, dtype=np.float32) * np.float32(0.1))

    def norm(name: str, size: int) -> None:
        add(f"{name}.weight", 1 + np.float32(0.1) * rng.standard_normal(size, dtype=np.float32))

    attention_bias = bool(config["attention_bias"])
    qkv_bias = attention_bias or architecture == "Qwen2ForCausalLM"
    add("model.embed_tokens.weight", rng.standard_normal((vocab, hidden), dtype=np.float32))
    for i in range(layers):
        at = f"model.layers.{i}"
        norm(f"{at}.input_layernorm", hidden)
        linear(f"{at}.self_attn.q_proj", heads * head_dim, hidden, bias=qkv_bias)
        linear(f"{at}.self_attn.k_proj", kv_heads * head_dim, hidden, bias=qkv_bias)
        linear(f"{at}.self_attn.v_proj", kv_heads * head_dim, hidden, bias=qkv_bias)
        linear(f"{at}.self_attn.o_proj", hidden, heads * head_dim, bias=attention_bias)
        if architecture == "Qwen3ForCausalLM":
            norm(f"{at}.self_attn.q_norm", head_dim)
            norm(f"{at}.self_attn.k_norm", head_dim)
        norm(f"{at}.post_attention_layernorm", hidden)
        linear(f"{at}.mlp.gate_proj", intermediate, hidden)
        linear(f"{at}.mlp.up_proj", intermediate, hidden)
        linear(f"{at}.mlp.down_proj", hidden, intermediate)
    norm("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        linear("lm_head", vocab, hidden)
    write_safetensors(folder / "model.safetensors", tensors, metadata={"format": "pt"})
    return folder
