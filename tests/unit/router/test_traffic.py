"""What requests tell of adapters that they could not wait for."""

from __future__ import annotations

from router.catalog import Version
from router.traffic import MAX_UNMET, Traffic


def version(digest: str) -> Version:
    return Version("v", digest, "base")


def test_what_requests_could_not_wait_for_is_told_once_however_many_they_were():
    traffic = Traffic()
    assert traffic.take_unmet() == []
    for _ in range(3):
        traffic.could_not_wait("w1", version("a"))
    traffic.could_not_wait("w2", version("a"))
    assert traffic.has_unmet.is_set()
    assert traffic.take_unmet() == [("w1", version("a")), ("w2", version("a"))]
    assert (traffic.has_unmet.is_set(), traffic.take_unmet()) == (False, [])


def test_no_more_than_so_many_are_remembered():
    traffic = Traffic()
    for number in range(MAX_UNMET + 10):
        traffic.could_not_wait("w1", version(f"a{number}"))
    assert len(traffic.take_unmet()) == MAX_UNMET
