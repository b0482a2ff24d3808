"""Patterns answer as `re` does on regular expressions, and never hang."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.adapter_format.patterns import UnsafePattern, compile_pattern

NAMES = [
    f"model.layers.{layer}.{site}"
    for layer in (0, 3, 12)
    for site in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
] + ["lm_head", "model.embed_tokens", ""]

# As PEFT's documentation and popular trainers write them.
REAL = [
    r".*\.(q|v)_proj$",
    r".*decoder.*(SelfAttention|EncDecAttention).*(q|v)$",
    r"^model\.layers\.0\.self_attn\.q_proj",
    r"model\.layers\.(0|3)\.mlp\.(up|down)_proj",
    r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|up_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:mlp)\.(?:(?:up_proj)))",
    r"model\.layers\.\d+\.[^.]+\.[a-z_]+",
    r"layers\.1[0-5]?\..*",
    r"\w+\S*\Z",
    r"model.layers.[^0]\D+proj\b",
    "q_proj",
    "layers.0.self_attn.q_proj",
]


@pytest.mark.parametrize("text", REAL)
def test_real_patterns_match_as_re_does(text):
    pattern = compile_pattern(text)
    for name in NAMES:
        assert pattern.matches(name) == bool(re.fullmatch(text, name)), name
        assert pattern.matches_suffix(name) == bool(re.match(rf"(.*\.)?({text})$", name)), name


atoms = st.sampled_from(["a", "b", ".", r"\.", "[ab]", "[^a]", r"\w", r"\d", r"\W", "^", "$", r"\b", r"\B", "[0-9]"])


def _extend(inner):
    repeat = st.sampled_from(["*", "+", "?", "*?", "+?", "{2}", "{1,3}", "{0,2}?", "{2,}"])
    return st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, repeat).map(lambda pair: f"({pair[0]}){pair[1]}"),
    )


@given(
    st.recursive(atoms, _extend, max_leaves=8),
    st.lists(st.text("ab.01_", min_size=1, max_size=7), min_size=1, max_size=8),
)
def test_any_regular_pattern_matches_as_re_does(text, names):
    pattern = compile_pattern(text)
    for name in names:
        assert pattern.matches(name) == bool(re.fullmatch(text, name)), name
        assert pattern.matches_suffix(name) == bool(re.match(rf"(.*\.)?({text})$", name)), name


NESTED = "(?:" * 7 + "." + "{60}|.)" * 7 + "{60}!"
CATASTROPHIC = [r"(.|.)*!", r"(.*.*)*.*.*.*.*!", r"(\w+\.?)+!", r"((a?){60}){60}", r"(x?){100000}!", NESTED]


@pytest.mark.parametrize("text", CATASTROPHIC)
def test_catastrophic_patterns_are_answered_at_once(text):
    started = time.process_time()
    assert not compile_pattern(text).matches("model.layers.0.self_attn.q_proj" * 3)
    assert time.process_time() - started < 1


NOT_REGULAR = ["(", "a**", r"(a)\1", "(?=a)a", "(?<!b)a", "(?i)a", "(?i:a)", "(?>a)b", "a*+"]
TOO_LARGE = ["x" * 2001, "(" * 10 + "a*" + ")*" * 10, "(" * 900 + ")" * 900]


@pytest.mark.parametrize("text", NOT_REGULAR + TOO_LARGE)
def test_what_is_not_regular_or_too_large_is_refused(text):
    with pytest.raises(UnsafePattern):
        compile_pattern(text)
