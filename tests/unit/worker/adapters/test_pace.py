"""What transfers are expected to take."""

from __future__ import annotations

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
