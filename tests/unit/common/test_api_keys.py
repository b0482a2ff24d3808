"""Keys have 256 random bits, and are recognized by their hash alone."""

from __future__ import annotations

import pytest

from common.api_keys import hash_of, id_of, is_key, make_key


def test_a_key_has_an_id_and_256_random_bits():
    key = make_key()
    prefix, key_id, secret = key.text.split("_")
    assert (prefix, key_id) == ("lpx", key.key_id)
    assert id_of(key.text) == key.key_id
    assert len(bytes.fromhex(secret)) * 8 == 256


def test_no_two_keys_are_alike():
    keys = [make_key() for _ in range(100)]
    assert len({key.text.split("_")[2] for key in keys}) == len({key.key_id for key in keys}) == 100


def test_a_key_does_not_show_itself():
    key = make_key()
    assert key.text not in repr(key)


def test_a_key_matches_its_own_hash_only():
    key, other = make_key(), make_key()
    assert is_key(key.text, hash_of(key.text))
    assert not is_key(other.text, hash_of(key.text))
    assert not is_key(key.text[:-1] + "x", hash_of(key.text))
    assert not is_key(key.text, None)
    assert key.text not in hash_of(key.text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "lpx",
        "lpx_abcd_",
        "lpx_abcd_" + "a" * 42,  # too short for 256 bits
        "lpx_abcd_" + "a" * 129,
        "lpx_abc_" + "a" * 64,
        "lpx_ABCD_" + "a" * 64,
        "lpx_abcd_" + "a" * 63 + "é",
        "lpx_abcd_" + "a" * 63 + " ",
        "lpx_abcd_" + "a" * 64 + "\n",
        "sk_abcd_" + "a" * 64,
    ],
)
def test_what_is_not_formed_like_a_key_has_no_id(text):
    assert id_of(text) is None
