"""How long a full disk is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from loraplex.errors import NoSpace
from worker.adapters.full_disk import PAUSE, FullDisk


def test_it_is_tried_again_after_pauses_that_grow_until_there_is_room():
    disk, now = FullDisk(Path("cache")), 0.0
    pauses: list[float] = []
    disk.check(now)
    for _ in range(6):
        pauses.append(disk.met(now).retry_after_s or 0.0)
        with pytest.raises(NoSpace) as refused:
            disk.check(now + pauses[-1] - 0.2)
        assert refused.value.retry_after_s == pytest.approx(0.2)
        now += pauses[-1]
        disk.check(now)
    assert pauses == [0.5, 1, 2, 4, PAUSE.longest_s, PAUSE.longest_s]
    disk.over()
    assert disk.met(now).retry_after_s == 0.5
