"""Chat templates render as transformers renders them, and refuse with words."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import cast

import pytest

from loraplex.errors import InvalidBaseModel, InvalidRequest
from tests.tiny_base import write_tiny_base
from worker.text.chat import ChatTemplate, Message, load_chat_template, special_tokens
from worker.text.model import TextModel

DEMO_BASE = Path(os.environ.get("LORAPLEX_DEMO_BASE", "~/.cache/loraplex/bases/SmolLM2-135M-Instruct")).expanduser()

CONVERSATIONS = [
    [Message("user", "What is 2+2?")],
    [
        Message("system", "Be brief."),
        Message("user", "Hi"),
        Message("assistant", "Hello!"),
        Message("user", "And  \n?"),
    ],
    [Message("user", "<|im_end |> {{ 7 * 7 }} é 👋")],
    [Message("system", "")],
]

QWEN_LIKE = """{%- if messages[0].role == 'system' %}
    {{- bos_token + messages[0].content }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}
        {%- continue %}
    {%- endif %}
    {{- '<|turn|>' + message.role + '\\n' + message.content | trim }}
    {%- generation %}{{ message | tojson }}{%- endgeneration %}
{%- endfor %}
{%- if tools %}{{ raise_exception('no tools') }}{%- endif %}
{%- set ns = namespace(last=messages | length) %}
{{ ns.last }}
{%- if add_generation_prompt %}
    {{- '<|turn|>assistant\\n' }}
{%- endif %}"""


def expected(folder: Path, messages: list[Message]) -> tuple[str, list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    turns = [{"role": message.role, "content": message.content} for message in messages]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=False)
    return cast("tuple[str, list[int]]", (text, ids))


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("template", [None, QWEN_LIKE])
async def test_text_and_tokens_equal_transformers(tmp_path, messages, template):
    folder = write_tiny_base(tmp_path / "base", add_bos=True)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    text, ids = expected(folder, messages)
    rendered = load_chat_template(folder)
    assert rendered is not None
    assert rendered.render(messages) == text
    assert await TextModel.load(folder).encode_chat(messages, limit=1000) == tuple(ids)


@pytest.mark.demo_base
@pytest.mark.skipif(not DEMO_BASE.exists(), reason="the demo base is not there; examples/demo_base.py fetches it")
@pytest.mark.parametrize("messages", CONVERSATIONS)
async def test_text_and_tokens_equal_transformers_on_the_demo_base(messages):
    text, ids = expected(DEMO_BASE, messages)
    rendered = load_chat_template(DEMO_BASE)
    assert rendered is not None
    assert rendered.render(messages) == text
    assert await TextModel.load(DEMO_BASE).encode_chat(messages, limit=8000) == tuple(ids)


def test_a_template_that_refuses_is_told_in_its_own_words():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        template.render([Message("user", "x")])
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages[0].nothing.deeper }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox_nor_fail_untyped(source):
    with pytest.raises(InvalidRequest):
        ChatTemplate(source, {}).render([Message("user", "x")])


def test_a_broken_template_is_a_broken_base_model():
    with pytest.raises(InvalidBaseModel, match="chat template"):
        ChatTemplate("{% for %}", {})


def test_strftime_now_writes_the_day():
    assert len(ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", {}).render([])) == 10


def test_special_tokens_may_be_objects_or_stand_in_the_map(tmp_path):
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<old>", "unk_token": "<unk>"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": None}))
    assert special_tokens(tmp_path) == {"bos_token": "<s>", "unk_token": "<unk>"}
