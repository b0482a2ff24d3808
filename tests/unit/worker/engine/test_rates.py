"""Measured speeds: start at the calibration, follow what is seen, are never 0."""

from __future__ import annotations

import pytest

from worker.engine.rates import StepRates


def test_the_calibration_stands_until_something_is_measured() -> None:
    rates = StepRates(500.0, 50.0)
    rates.add_step(0, 0, 0.0)
    assert (rates.prefill.tokens_per_second, rates.decode.tokens_per_second) == (500.0, 50.0)


def test_the_speed_follows_what_is_measured() -> None:
    rates = StepRates(500.0, 50.0)
    for _ in range(300):
        rates.add_step(0, 8, 0.1)
    assert rates.decode.tokens_per_second == pytest.approx(80, rel=0.01)
    assert rates.prefill.tokens_per_second == 500.0


def test_a_mixed_step_is_split_by_expected_cost() -> None:
    rates = StepRates(1000.0, 50.0)
    for _ in range(300):
        rates.add_step(100, 5, 0.2)  # exactly as expected: 0.1 s each
    assert rates.prefill.tokens_per_second == pytest.approx(1000, rel=0.01)
    assert rates.decode.tokens_per_second == pytest.approx(50, rel=0.01)


def test_one_short_odd_step_hardly_counts() -> None:
    rates = StepRates(1000.0, 50.0)
    rates.add_step(1, 0, 0.02)
    assert rates.prefill.tokens_per_second == pytest.approx(1000, rel=0.03)


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan")])
def test_a_calibration_of_nothing_is_refused(speed: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        StepRates(speed, 1.0)
