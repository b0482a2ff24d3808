"""Orders: none twice at a time, none too soon again, bounded at a time and per worker."""

from __future__ import annotations

from router.catalog import Version
from router.orders import Deliveries, Order, OrderKind


def order(kind: OrderKind = OrderKind.PIN, worker_id: str = "w1", epoch: str = "e1", digest: str = "a") -> Order:
    return Order(kind, f"{worker_id}:1", worker_id, epoch, "base", Version("v", digest, "base"))


def test_an_order_in_flight_is_not_sent_again():
    deliveries = Deliveries()
    assert deliveries.begin([order(), order()], 0.0) == ([order()], None)
    assert deliveries.begin([order()], 100.0) == ([], None)
    assert deliveries.in_flight == 1


def test_pauses_between_the_same_words_double_up_to_a_minute():
    deliveries = Deliveries()
    now_s, pauses = 0.0, []
    for _ in range(9):
        due, _ = deliveries.begin([order()], now_s)
        assert due == [order()]
        deliveries.end(order(), now_s)
        due, again_s = deliveries.begin([order()], now_s)
        assert due == []
        assert again_s is not None
        pauses.append(again_s - now_s)
        now_s = again_s
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_other_words_another_worker_and_another_epoch_need_not_wait():
    deliveries = Deliveries()
    deliveries.begin([order()], 0.0)
    deliveries.end(order(), 0.0)
    others = [order(OrderKind.UNPIN), order(worker_id="w2"), order(epoch="e2"), order(digest="b")]
    assert deliveries.begin([order(), *others], 0.5) == (others, 1.0)


def test_no_more_are_in_flight_than_may_be_at_a_time_and_per_worker():
    deliveries = Deliveries(at_a_time=3, per_worker=2)
    wanted = [order(worker_id=worker, digest=digest) for worker in ("w1", "w2") for digest in "abc"]
    first, _ = deliveries.begin(wanted, 0.0)
    assert [(o.worker_id, o.version.artifact_digest) for o in first] == [("w1", "a"), ("w1", "b"), ("w2", "a")]
    deliveries.end(first[0], 0.0)
    second, _ = deliveries.begin(wanted, 0.5)
    assert [(o.worker_id, o.version.artifact_digest) for o in second] == [("w1", "c")]


def test_what_was_not_said_for_long_is_forgotten():
    deliveries = Deliveries()
    for _ in range(6):
        deliveries.begin([order()], 0.0)
        deliveries.end(order(), 0.0)
    deliveries.begin([order(digest="b")], 700.0)
    deliveries.end(order(digest="b"), 700.0)
    assert deliveries.begin([order()], 700.0)[0] == [order()]
    deliveries.end(order(), 700.0)
    assert deliveries.begin([order()], 700.5) == ([], 701.0)
