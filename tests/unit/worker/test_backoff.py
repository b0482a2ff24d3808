from __future__ import annotations

from worker.backoff import Backoff


def test_pauses_double_up_to_the_longest_and_health_resets_them():
    backoff, pauses = Backoff(), []
    for _ in range(8):
        backoff, pause = backoff.after(1.0)
        pauses.append(pause)
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert backoff.after(60.0)[1] == 0.5


def test_a_thousand_failures_do_not_overflow():
    assert Backoff(failures=100_000).after(0.0)[1] == 30
