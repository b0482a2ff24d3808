"""What is kept of a caller's time to tell it that something did not come."""

from __future__ import annotations

import pytest

from worker.deadline import time_to_wait


@pytest.mark.parametrize(("left_s", "waited_s"), [(0.0, 0.0), (1.0, 0.9), (5.0, 4.5), (600.0, 599.5)])
def test_a_tenth_is_kept_and_half_a_second_at_most(left_s: float, waited_s: float) -> None:
    assert time_to_wait(left_s) == pytest.approx(waited_s)
