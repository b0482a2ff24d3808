"""What is known of a fetch before it ends."""

from __future__ import annotations

from worker.adapters.progress import PATIENCE_S, Progress


def test_what_is_left_follows_from_the_bytes_that_came_without_the_wait_for_a_turn_or_for_room():
    progress = Progress()
    assert (progress.seconds(5.0), progress.left_s(5.0)) == (0.0, None)
    progress.begin(10.0)
    progress.pause(1000, 11.0)
    assert progress.seconds(15.0) == 1.0
    progress.go_on(21.0)
    assert progress.left_s(22.0) is None
    progress.got(250, 22.0)
    assert progress.seconds(22.0) == 2.0
    assert progress.left_s(22.0) == 6.0
    progress.got(750, 23.0)
    assert progress.left_s(23.0) == 0.0
    progress.begin(30.0)
    assert (progress.seconds(31.0), progress.left_s(31.0)) == (1.0, None)


def test_a_source_is_asked_in_vain_that_fails_or_stays_silent_before_the_first_byte():
    progress = Progress()
    assert not progress.is_in_vain(100.0)  # it waits for its turn
    progress.begin(100.0)
    assert not progress.is_in_vain(100.1)
    assert progress.is_in_vain(100.0 + PATIENCE_S)
    progress.fail()
    assert progress.is_in_vain(100.1)
    progress.pause(1000, 101.0)
    assert not progress.is_in_vain(200.0)  # it waits for room
    progress.go_on(200.0)
    progress.got(10, 200.0)
    progress.fail()
    assert not progress.is_in_vain(300.0)  # what has come is worth going on
