"""What transfers are expected to take."""

from __future__ import annotations

import random

import pytest

from worker.adapters.pace import Pace


def test_before_the_first_transfer_it_is_a_guess():
    pace = Pace(guess_s=0.5, guess_bytes=100)
    assert not pace.is_measured
    assert pace.expected_s(200) == 1.0


def test_the_first_transfer_replaces_the_guess_and_later_ones_move_it_slowly():
    pace = Pace(guess_s=100.0, guess_bytes=1)
    pace.add(1000, 1.0)
    assert pace.is_measured
    assert pace.expected_s(500) == pytest.approx(0.5)
    pace.add(1000, 11.0)
    assert 1.0 < pace.expected_s(1000) < 11.0
    for _ in range(50):
        pace.add(1000, 2.0)
    assert pace.expected_s(1000) == pytest.approx(2.0, rel=0.01)


def test_what_all_transfers_take_is_told_apart_from_what_a_byte_takes():
    pace = Pace()
    for num_bytes in (200_000, 50_000_000) * 10:
        pace.add(num_bytes, 0.05 + num_bytes * 1e-8)
    assert pace.expected_s(0) == pytest.approx(0.05)
    assert pace.expected_s(100_000_000) == pytest.approx(1.05)


def test_small_transfers_say_little_of_what_a_large_one_takes():
    pace = Pace()
    for _ in range(20):
        pace.add(200_000, 0.05)
    assert pace.expected_s(400_000) == pytest.approx(0.1)
    assert pace.expected_s(1_000_000_000) == pytest.approx(0.2)


def test_one_large_transfer_is_enough_to_tell_what_others_take():
    pace = Pace()
    for num_bytes in (200_000, 200_000, 200_000, 1_000_000_000):
        pace.add(num_bytes, 0.05 + num_bytes * 1e-8)
    assert pace.expected_s(1_000_000_000) == pytest.approx(10, rel=0.01)
    assert pace.expected_s(200_000) == pytest.approx(0.05, rel=0.1)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_was_measured_more_bytes_never_take_less_and_odd_ones_turn_nothing_upside_down(seed):
    chance, pace = random.Random(seed), Pace()
    slowest = 0.0
    for _ in range(30):
        seconds = chance.expovariate(10)
        slowest = max(slowest, seconds)
        pace.add(chance.choice((100, 1000, chance.randrange(10**6))), seconds)
    expected = [pace.expected_s(num_bytes) for num_bytes in range(0, 10**7, 10**5)]
    assert expected == sorted(expected)
    assert expected[0] >= 0
    assert pace.expected_s(100) <= slowest
