"""What a soak reads out of a worker's metrics."""

from __future__ import annotations

import pytest

from bench.soak import Steps
from worker.metrics import Metrics


def metrics_of(*seconds: float) -> Steps:
    """A real worker's metrics after such steps."""
    metrics = Metrics(lambda: None)  # type: ignore[arg-type, return-value]
    for taken in seconds:
        metrics.step(taken)
    text = "".join(_exposed(metrics))
    return Steps.parse(text)


def _exposed(metrics: Metrics) -> list[str]:
    lines = []
    for collector in (metrics.step_s, metrics.slowest_step_s):
        for family in collector.collect():
            for sample in family.samples:
                labels = "".join(f'{{le="{value}"}}' for value in sample.labels.values())
                lines.append(f"{sample.name}{labels} {sample.value}\n")
    return lines


def test_a_median_is_told_to_within_a_bucket_and_the_slowest_exactly() -> None:
    steps = metrics_of(*[0.1] * 60, *[0.02] * 39, 0.95)
    assert steps.slowest_s == 0.95
    assert steps.quantile_s(0.5) == pytest.approx(0.1, rel=0.34)
    assert steps.quantile_s(0.2) == pytest.approx(0.02, rel=0.34)
    assert 0.7 < steps.quantile_s(0.995) <= 0.95


def test_what_was_before_does_not_count_and_an_older_slowest_is_bounded_by_its_bucket() -> None:
    before, after = [3.0, 0.02, 0.02], [0.1] * 50 + [0.4]
    steps = metrics_of(*before, *after).since(metrics_of(*before))
    assert max(steps.counts.values()) == 51
    assert 0.4 <= steps.slowest_s < 0.55
    assert steps.quantile_s(0.5) == pytest.approx(0.1, rel=0.34)


def test_without_steps_there_is_no_median() -> None:
    nothing = metrics_of(0.1).since(metrics_of(0.1))
    with pytest.raises(ValueError, match="no step"):
        nothing.quantile_s(0.5)
