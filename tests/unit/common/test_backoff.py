"""Pauses double up to the longest, and jitter only shortens them."""

from __future__ import annotations

import random

from common.backoff import Backoff

BACKOFF = Backoff(first_s=0.5, longest_s=30.0)


def test_pauses_double_up_to_the_longest():
    assert [BACKOFF.pause_s(failures) for failures in range(1, 9)] == [0.5, 1, 2, 4, 8, 16, 30, 30]


def test_a_thousand_failures_do_not_overflow():
    assert BACKOFF.pause_s(100_000) == 30


def test_jitter_shortens_by_half_at_most_and_never_below_the_first():
    rng = random.Random(1)
    pauses = [BACKOFF.jittered_s(failures, rng) for failures in (1, 2, 3, 50) for _ in range(100)]
    assert min(pauses) >= 0.5
    assert max(pauses) <= 30
    assert len(set(pauses)) > 200
