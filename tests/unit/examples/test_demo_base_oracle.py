"""The converted demo base against what transformers makes of the same GGUF."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.demo_base, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")]

TEXTS = [
    "",
    "The capital of France is Paris.",
    "don't I'll we've you're it's HE'S",
    "  two spaces, a tab\tand\n\nnew lines \r\n at the end   ",
    "Grüße aus Köln – ça va? Привет, мир! Γειά σου",  # noqa: RUF001
    "日本語のテキストと中文和한국어",
    "emoji 👍🏽 family 👨‍👩‍👧‍👦 flag 🇧🇷",
    "naïve cafe\u0301 ﬁne",
    "def f(x):\n    return x ** 2  # comment\n",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> <repo_name>x<jupyter_code>",
    "<|im_start|user not special <|im_end |>",
    "a\u00a0b\u200bc\ufeffd",
]
DIGITS = [
    "12345",
    "in 1999, 3.14 and 1,000,000",
    "x2y3 v1.2.3",
    "٣٤٥ and १२३ and ５６",  # noqa: RUF001
    "1½ Ⅷ ²",
    "2nd 10% $5 <|im_end|>7",
]
CHATS = [
    [{"role": "user", "content": "What is 2 + 2?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\nthere"}],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello! 👋"},
        {"role": "user", "content": "Bye <|im_end|>"},
    ],
]


@pytest.fixture(scope="module")
def ours(demo_base: Path) -> Tokenizer:
    return Tokenizer.from_file(str(demo_base / "tokenizer.json"))


@pytest.fixture(scope="module")
def theirs(demo_gguf: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(demo_gguf.parent, gguf_file=demo_gguf.name)


def test_weights_equal_transformers_bit_for_bit(demo_base: Path, demo_gguf: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        demo_gguf.parent,
        gguf_file=demo_gguf.name,
        dtype=torch.bfloat16,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    expected = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    weights = load_file(demo_base / "model.safetensors")
    assert weights.keys() == expected.keys()
    for name, value in weights.items():
        assert torch.equal(value.view(torch.int16), expected[name].view(torch.int16)), name


def test_transformers_reads_the_config_as_the_gguf(demo_base: Path, demo_gguf: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(demo_base)
    expected = transformers.AutoConfig.from_pretrained(demo_gguf.parent, gguf_file=demo_gguf.name)
    for name in (
        "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "rope_parameters", "hidden_act",
        "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "attention_bias", "mlp_bias",
    ):  # fmt: skip
        assert getattr(config, name) == getattr(expected, name), name
    assert config.rms_norm_eps == pytest.approx(expected.rms_norm_eps, rel=1e-6)
    assert config.dtype == torch.bfloat16


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_equal_those_of_the_gguf(ours: Tokenizer, theirs: Any, text: str) -> None:
    assert ours.encode(text).ids == theirs.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("text", [*TEXTS, *DIGITS])
def test_tokens_and_text_equal_those_of_transformers(ours: Tokenizer, demo_base: Path, text: str) -> None:
    loaded = transformers.AutoTokenizer.from_pretrained(demo_base)
    ids = loaded.encode(text, add_special_tokens=False)
    assert ours.encode(text).ids == ids
    assert ours.decode(ids, skip_special_tokens=False) == loaded.decode(ids) == text


@pytest.mark.parametrize("text", [*TEXTS, *DIGITS])
def test_text_is_split_as_llama_cpp_splits_it(ours: Tokenizer, text: str) -> None:
    """transformers' GGUF reader forgets the digits, so the split is checked against llama.cpp's two expressions."""
    regex = pytest.importorskip("regex")
    single_digits = [part for part in regex.split(r"(\p{N})", text) if part]
    words = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    expected = [word for part in single_digits for word in regex.findall(words, part)]
    pieces = ours.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in pieces] == expected


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_the_chat_template_renders_the_same(
    theirs: Any, demo_base: Path, messages: list[dict[str, str]], add_generation_prompt: bool
) -> None:
    loaded = transformers.AutoTokenizer.from_pretrained(demo_base)
    options = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
    assert loaded.apply_chat_template(messages, **options) == theirs.apply_chat_template(messages, **options)
    template = json.loads((demo_base / "tokenizer_config.json").read_text())["chat_template"]
    assert template == theirs.chat_template


def test_special_tokens_are_those_of_transformers(theirs: Any, demo_base: Path) -> None:
    loaded = transformers.AutoTokenizer.from_pretrained(demo_base)
    for name in ("bos_token", "eos_token", "pad_token", "unk_token", "all_special_ids"):
        assert getattr(loaded, name) == getattr(theirs, name), name
    assert {token.content for token in loaded.added_tokens_decoder.values()} == {
        token.content for token in theirs.added_tokens_decoder.values()
    }


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("config.json", "096a2a5d27da023d9af905b5902fcecea235dcb1022ddea17fe3a69c4d1e85a5"),
        ("model.safetensors", "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"),
        ("tokenizer.json", "a4299d38385d2b5e399f48b06c47bac9455d315d1a92cac459d8c2850847d66c"),
        ("tokenizer_config.json", "a655b5b30ad7341f1f4363478b98da00b04e87e56b931b8ca7cc17765dbbc77b"),
    ],
)
def test_the_bytes_are_the_same_on_every_machine(demo_base: Path, name: str, digest: str) -> None:
    with (demo_base / name).open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == digest
