"""Which share of a batch steps as fast mixed as the whole on one adapter."""

from __future__ import annotations

import pytest

from bench.mixed_batches import equal_step_ratio


@pytest.mark.parametrize(
    ("one_adapter_ms", "ratio"),
    [
        (100.0, 0.5),  # as the mixed batch of 32
        (150.0, 0.75),  # half-way from 32 to 64
        (190.0, 0.95),
        (200.0, 1.0),
        (230.0, 1.0),  # mixing costs nothing
        (60.0, 0.5),  # never less
        (10.0, 0.5),
    ],
)
def test_the_ratio_is_where_mixed_steps_take_as_long(one_adapter_ms: float, ratio: float) -> None:
    assert equal_step_ratio({16: 50.0, 32: 100.0, 64: 200.0}, one_adapter_ms) == ratio
