from __future__ import annotations

import pytest

from worker.model.calibration import PHASE_S, tokens_per_second


class Machine:
    """Computes n tokens in `fixed + n · each` seconds of a clock of its own."""

    def __init__(self, fixed_s: float, each_s: float) -> None:
        self.now, self.fixed_s, self.each_s = 0.0, fixed_s, each_s
        self.sizes: list[int] = []

    def run(self, size: int) -> None:
        self.sizes.append(size)
        self.now += self.fixed_s + size * self.each_s

    def clock(self) -> float:
        return self.now


def test_a_fast_machine_is_measured_at_full_size() -> None:
    machine = Machine(0.001, 1e-5)
    speed = tokens_per_second(machine.run, 500, machine.clock)
    assert machine.sizes[-1] == 500
    assert speed == pytest.approx(500 / (0.001 + 500e-5))
    assert machine.now <= PHASE_S


def test_a_slow_machine_is_measured_small_and_in_time() -> None:
    machine = Machine(0.0, 0.02)
    assert tokens_per_second(machine.run, 500, machine.clock) == pytest.approx(50)
    assert machine.now <= PHASE_S


def test_one_run_is_made_however_long_it_takes() -> None:
    machine = Machine(7.0, 0.0)
    assert tokens_per_second(machine.run, 3, machine.clock) == pytest.approx(3 / 7)
    assert machine.sizes == [3]
