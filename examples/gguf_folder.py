"""Turns a GGUF file of the Llama family with a byte-level BPE tokenizer into a Hugging Face model folder.

Owns: the names and the layout of both sides, and the bytes written. The same GGUF gives the same bytes on every machine
and with every version of the libraries, because the safetensors header and the JSON files are written here and not by a
library. Does not know where the GGUF came from nor where the folder finally lives.

Only `gguf` and `numpy` are needed: torch, transformers, tokenizers and safetensors are not.
"""

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np
import numpy.typing as npt

CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of a special token

OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

Progress = Callable[[int, int], None]


class UnsupportedGgufError(ValueError):
    """The GGUF file is not one this module can convert."""


@dataclass(frozen=True, slots=True)
class Gguf:
    """An open GGUF file: its metadata by key, and its tensors in the order of the file."""

    path: Path
    metadata: dict[str, Any]
    tensors: tuple[Any, ...]

    @classmethod
    def open(cls, path: Path) -> "Gguf":
        """Map the file; tensors are read when they are used."""
        reader = gguf.GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        for key, supported in (("general.architecture", "llama"), ("tokenizer.ggml.model", "gpt2")):
            if metadata.get(key) != supported:
                raise UnsupportedGgufError(
                    f"{path.name}: {key} is {metadata.get(key)!r}, only {supported!r} is supported"
                )
        return cls(path, metadata, tuple(reader.tensors))

    def __getitem__(self, key: str) -> Any:
        """Give the metadata under `key`, or say which key the file lacks."""
        if key not in self.metadata:
            raise UnsupportedGgufError(f"{self.path.name}: metadata {key!r} is missing")
        return self.metadata[key]


def write_folder(source: Gguf, folder: Path, model_name: str, progress: Progress) -> None:
    """Write the model folder of `source` into the existing `folder`; `progress(done, total)` counts tensors."""
    _write_json(folder / "config.json", config(source, model_name))
    _write_json(folder / "generation_config.json", generation_config(source))
    _write_json(folder / "tokenizer.json", tokenizer(source))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(source))
    with (folder / "model.safetensors").open("wb") as file:
        write_weights(source, file, progress)


def config(source: Gguf, model_name: str) -> dict[str, Any]:
    """`config.json`. The RMS epsilon is stored as float32; its shortest float32 decimal is the value that was meant."""
    num_heads = source["llama.attention.head_count"]
    hidden_size = source["llama.embedding_length"]
    return {
        "_name_or_path": model_name,
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": source["tokenizer.ggml.bos_token_id"],
        "eos_token_id": source["tokenizer.ggml.eos_token_id"],
        "head_dim": hidden_size // num_heads,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": source["llama.feed_forward_length"],
        "max_position_embeddings": source["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": num_heads,
        "num_hidden_layers": source["llama.block_count"],
        "num_key_value_heads": source["llama.attention.head_count_kv"],
        "pad_token_id": source["tokenizer.ggml.padding_token_id"],
        "rms_norm_eps": float(str(np.float32(source["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_scaling": None,
        "rope_theta": source["llama.rope.freq_base"],
        "tie_word_embeddings": not any(tensor.name == "output.weight" for tensor in source.tensors),
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": source["llama.vocab_size"],
    }


def generation_config(source: Gguf) -> dict[str, Any]:
    """`generation_config.json`: where generation starts and stops."""
    return {
        "bos_token_id": source["tokenizer.ggml.bos_token_id"],
        "eos_token_id": source["tokenizer.ggml.eos_token_id"],
        "pad_token_id": source["tokenizer.ggml.padding_token_id"],
    }


def tokenizer(source: Gguf) -> dict[str, Any]:
    """`tokenizer.json` as `tokenizers.Tokenizer.from_file` reads it.

    llama.cpp names the pre-tokenizer only: `smollm` splits off every single digit, then splits as GPT-2 does.
    """
    if source["tokenizer.ggml.pre"] != "smollm":
        raise UnsupportedGgufError(f"pre-tokenizer {source['tokenizer.ggml.pre']!r} is not known, only 'smollm' is")
    tokens: list[str] = source["tokenizer.ggml.tokens"]
    types: list[int] = source["tokenizer.ggml.token_type"]
    added = [
        {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == CONTROL_TOKEN
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in source["tokenizer.ggml.merges"]],
        },
    }


def tokenizer_config(source: Gguf) -> dict[str, Any]:
    """`tokenizer_config.json`: roles of the special tokens, and the chat template."""
    tokens: list[str] = source["tokenizer.ggml.tokens"]
    return {
        "add_prefix_space": False,
        "bos_token": tokens[source["tokenizer.ggml.bos_token_id"]],
        "chat_template": source["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[source["tokenizer.ggml.eos_token_id"]],
        "model_max_length": source["llama.context_length"],
        "pad_token": tokens[source["tokenizer.ggml.padding_token_id"]],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tokens[source["tokenizer.ggml.unknown_token_id"]],
    }


def write_weights(source: Gguf, file: BinaryIO, progress: Progress) -> None:
    """Write all tensors as one bfloat16 safetensors file, sorted by name, one tensor in memory at a time.

    safetensors: the header's length as uint64, the JSON header padded with spaces to 8 bytes, then the data.
    """
    tensors = sorted((hugging_face_name(tensor.name), tensor) for tensor in source.tensors)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        start, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    file.write(struct.pack("<Q", len(encoded)) + encoded)
    for done, (name, tensor) in enumerate(tensors, start=1):
        file.writelines(_chunks(_weights(source, name, tensor)))
        progress(done, len(tensors))


def hugging_face_name(name: str) -> str:
    """Translate llama.cpp's tensor name: `blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    *path, kind = name.split(".")
    match path:
        case [outer] if outer in OUTER_NAMES:
            return f"{OUTER_NAMES[outer]}.{kind}"
        case ["blk", layer, inner] if inner in LAYER_NAMES:
            return f"model.layers.{layer}.{LAYER_NAMES[inner]}.{kind}"
    raise UnsupportedGgufError(f"tensor {name!r} has no place in a Llama model")


def undo_rope_permutation(weights: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Give the rows of W_q or W_k [heads x head_dim, hidden] back the order of Hugging Face.

    llama.cpp rotates neighbours (0, 1), (2, 3), …; Hugging Face rotates halves (0, d/2), (1, d/2 + 1), ….
    """
    rows, columns = weights.shape
    return weights.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round finite float32 to the nearest bfloat16, ties to even; the result holds the upper 16 bits."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounding = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return ((bits + rounding) >> np.uint32(16)).astype("<u2")


def _weights(source: Gguf, name: str, tensor: Any) -> npt.NDArray[np.uint16]:
    weights = gguf.dequantize(tensor.data, tensor.tensor_type)
    if name.endswith("q_proj.weight"):
        weights = undo_rope_permutation(weights, source["llama.attention.head_count"])
    elif name.endswith("k_proj.weight"):
        weights = undo_rope_permutation(weights, source["llama.attention.head_count_kv"])
    return to_bfloat16(weights)


def _chunks(values: npt.NDArray[np.uint16], chunk_bytes: int = 1 << 22) -> Iterator[bytes]:
    flat = values.reshape(-1)
    step = chunk_bytes // flat.itemsize
    for start in range(0, flat.size, step):
        yield flat[start : start + step].tobytes()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
