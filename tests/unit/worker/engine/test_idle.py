"""The order in which idle things leave."""

from __future__ import annotations

import random

from worker.engine.idle import IdleOrder


def test_the_lowest_priority_leaves_first_and_of_equals_the_first_added() -> None:
    idle: IdleOrder[int] = IdleOrder()
    for member, priority in ((1, 2.0), (2, 1.0), (3, 1.0), (4, 0.5)):
        idle.add(member, priority)
    assert idle.in_order() == [4, 2, 3, 1]
    assert idle.least() == (0.5, 4)
    assert idle.least({4, 2}) == (1.0, 3)
    assert idle.least({1, 2, 3, 4}) is None
    assert idle.least() == (0.5, 4)  # skipping is not leaving


def test_it_agrees_with_sorting_and_does_not_grow_with_use() -> None:
    rng = random.Random(1)
    idle: IdleOrder[int] = IdleOrder()
    expected: dict[int, tuple[float, int]] = {}
    for step in range(5000):
        member = rng.randrange(50)
        if member in expected:
            idle.discard(member)
            del expected[member]
        else:
            priority = float(rng.randrange(5))
            idle.add(member, priority)
            expected[member] = (priority, step)
        idle.discard(99)
        skip = {rng.randrange(50) for _ in range(3)}
        rest = [m for m in expected if m not in skip]
        least = min(rest, key=expected.__getitem__, default=None)
        assert idle.least(skip) == (None if least is None else (expected[least][0], least))
        assert idle.in_order() == sorted(expected, key=expected.__getitem__)
        assert len(idle) == len(expected)
    assert len(idle._heap) < 400
