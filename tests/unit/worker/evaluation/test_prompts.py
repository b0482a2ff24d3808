"""The built-in prompts are what their version says: whoever changes them changes it, and this test."""

from __future__ import annotations

import hashlib

from worker.evaluation.prompts import built_in_prompts

DIGESTS = {1: "202bf1421872ab07dbce5a6fd19a5f505515b4c88522bca1a2b4a1711f62e955"}


def test_the_prompts_of_a_version_never_change() -> None:
    prompts = built_in_prompts()
    assert hashlib.sha256("\0".join(prompts.texts).encode()).hexdigest() == DIGESTS[prompts.version]


def test_they_are_many_short_and_each_another() -> None:
    texts = built_in_prompts().texts
    assert len(texts) == len(set(texts)) >= 90
    assert all(0 < len(text) <= 200 for text in texts)
