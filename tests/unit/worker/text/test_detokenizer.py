"""Tokens become text exactly and never in half characters, for both families of tokenizers."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from loraplex.errors import InvalidBaseModel
from tests.tiny_base import EOS, SPECIALS, TURN, write_tiny_tokenizer
from worker.text.detokenizer import Detokenizer
from worker.text.vocabulary import Vocabulary

WORDS = st.text(st.characters(codec="utf-8"), max_size=40)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory) -> Tokenizer:
    return write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), 300)


def sentencepiece_like() -> Tokenizer:
    """As Llama 2 and Mistral have it: ▁ for spaces, <0xNN> for bytes without a piece."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefgh", "ab", "▁ab"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: at for at, piece in enumerate(pieces)},
            merges=[("a", "b"), ("▁", "ab")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return tokenizer


def stream(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(Vocabulary(tokenizer))
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@given(WORDS)
def test_valid_text_comes_back_exactly_and_never_as_replacement_characters(byte_level, text):
    pieces = stream(byte_level, byte_level.encode(text).ids)
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@given(st.lists(st.integers(0, 299), max_size=40))
def test_any_tokens_give_what_the_tokenizers_library_gives(byte_level, token_ids):
    assert "".join(stream(byte_level, token_ids)) == byte_level.decode(token_ids, skip_special_tokens=True)


@given(WORDS)
def test_sentencepiece_text_comes_back_with_the_space_that_continues_the_prompt(text):
    tokenizer = sentencepiece_like()
    assert "".join(stream(tokenizer, tokenizer.encode(text, add_special_tokens=False).ids)) == (
        " " + text if text else ""
    )


def test_a_character_over_several_tokens_comes_out_whole(byte_level):
    pieces = stream(byte_level, byte_level.encode("👋").ids)
    assert pieces[:-2] == [""] * (len(pieces) - 2)
    assert pieces[-2:] == ["👋", ""]


def test_a_special_token_is_no_text_and_does_not_break_a_character(byte_level):
    first, second = byte_level.encode("é").ids
    assert stream(byte_level, [first, SPECIALS.index(TURN), second, SPECIALS.index(EOS)]) == ["", "", "é", "", ""]


def test_an_unfinished_character_at_the_end_becomes_one_replacement_character(byte_level):
    assert stream(byte_level, byte_level.encode("a👋").ids[:-1])[-1] == "\ufffd"


def test_a_byte_that_can_start_no_character_does_not_hold_up_the_text(byte_level):
    stray = byte_level.encode("é").ids[1]
    (a,) = byte_level.encode("a").ids
    assert stream(byte_level, [stray, a]) == ["\ufffd", "a", ""]


def test_ids_beyond_the_vocabulary_are_no_text(byte_level):
    assert stream(byte_level, [100_000]) == ["", ""]


def test_end_of_sequence_ids_of_the_config_are_special_even_where_the_tokenizer_does_not_say_so(byte_level):
    (a,) = byte_level.encode("a").ids
    assert Vocabulary(byte_level, extra_special_ids=[a]).is_special(a)


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.BPEDecoder()])
def test_an_unknown_decoder_is_refused_by_name(tmp_path: Path, decoder):
    tokenizer = write_tiny_tokenizer(tmp_path, 300)
    tokenizer.decoder = decoder
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(InvalidBaseModel, match="decoder"):
        Vocabulary(tokenizer)
