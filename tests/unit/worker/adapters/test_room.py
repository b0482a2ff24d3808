"""Whose turn it is to get the disk cache's room."""

from __future__ import annotations

from worker.adapters.room import MAX_PASSED, Claims
from worker.engine.residency import FOR_REQUEST
from worker.mailbox import Urgency


def a_request() -> int:
    return FOR_REQUEST


def a_prefetch() -> int:
    return Urgency.AHEAD


def test_the_most_urgent_goes_first_and_of_equals_who_came_first():
    claims = Claims()
    ahead, first, second = (claims.add(100, urgency) for urgency in (a_prefetch, a_request, a_request))
    for expected in (first, second, ahead):
        assert claims.next(1000) is expected
        claims.take(expected)
    assert claims.next(1000) is None


def test_who_becomes_urgent_moves_up():
    urgency = [Urgency.AHEAD, Urgency.AHEAD]
    claims = Claims()
    claims.add(100, lambda: urgency[0])
    second = claims.add(100, lambda: urgency[1])
    urgency[1] = Urgency.ASKED
    assert claims.next(1000) is second


def test_who_does_not_fit_yet_lets_who_fits_go_first():
    claims = Claims()
    ahead, large, small = claims.add(900, a_prefetch), claims.add(900, a_request), claims.add(100, a_request)
    assert claims.next(400) is small
    claims.take(small)
    assert claims.next(400) is None
    claims.drop(large)
    assert claims.next(900) is ahead


def test_nobody_takes_room_that_the_more_urgent_wait_for():
    claims = Claims()
    claims.add(100, a_prefetch)
    claims.add(900, a_request)
    assert claims.next(400) is None


def test_a_large_one_is_passed_so_many_times_and_no_more():
    claims = Claims()
    large = claims.add(900, a_request)
    for _ in range(MAX_PASSED):
        small = claims.add(100, a_request)
        assert claims.next(400) is small
        claims.take(small)
    claims.add(100, a_request)
    assert claims.next(400) is None
    assert claims.next(900) is large
    claims.drop(large)
    claims.drop(large)
    assert claims.next(400) is not None
