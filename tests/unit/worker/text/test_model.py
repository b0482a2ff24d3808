"""Prompts and conversations become tokens, and what does not fit is told with limit and length."""

from __future__ import annotations

import json

import pytest

from loraplex.errors import EmptyPrompt, InvalidBaseModel, InvalidRequest, PromptTooLong
from tests.tiny_base import BOS, SPECIALS, write_tiny_base
from worker.text.chat import Message
from worker.text.model import TextModel


async def test_a_plain_prompt_gets_what_the_tokenizers_post_processor_adds(tmp_path):
    with_bos = TextModel.load(write_tiny_base(tmp_path / "base", add_bos=True))
    assert (await with_bos.encode_prompt("hi", limit=100))[0] == SPECIALS.index(BOS)


async def test_special_tokens_in_a_prompt_are_special(tiny_text):
    assert await tiny_text.encode_prompt("</s>", limit=100) == (1,)


async def test_truncation_and_padding_of_the_tokenizer_file_are_ignored(tmp_path):
    folder = write_tiny_base(tmp_path / "base")
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    assert len(await TextModel.load(folder).encode_prompt("q" * 50, limit=100)) == 50


@pytest.mark.parametrize("length", [101, 5_000])
async def test_a_prompt_that_is_too_long_is_told_limit_and_length(tiny_text, length):
    with pytest.raises(PromptTooLong, match=f"{length} tokens.*at most 100") as caught:
        await tiny_text.encode_prompt("q" * length, limit=100)
    assert caught.value.metadata == {"field": "prompt", "limit": "100", "length": str(length)}


async def test_a_hopelessly_long_prompt_is_refused_without_tokenizing_it(tiny_text, monkeypatch):
    monkeypatch.setattr(tiny_text, "_tokenizer", None)
    with pytest.raises(PromptTooLong, match="at least"):
        await tiny_text.encode_prompt("q" * 300_000, limit=100)


async def test_text_without_tokens_is_an_empty_prompt(tiny_text):
    with pytest.raises(EmptyPrompt):
        await tiny_text.encode_prompt("", limit=100)


async def test_a_base_without_a_chat_template_points_to_completions(tmp_path):
    folder = write_tiny_base(tmp_path / "base")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidRequest, match=r"no chat template.*completions"):
        await TextModel.load(folder).encode_chat([Message("user", "x")], limit=100)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["{", "[]"])
def test_damaged_files_are_a_typed_error(tmp_path, name, content):
    folder = write_tiny_base(tmp_path / "base")
    (folder / name).write_text(content)
    with pytest.raises(InvalidBaseModel):
        TextModel.load(folder)
