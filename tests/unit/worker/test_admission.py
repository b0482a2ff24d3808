"""What the front end takes and counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.errors import InvalidParameter, QueueFull
from worker.admission import Admission


def admission(max_running=2, max_waiting=2):
    changes: list[str | None] = []
    made = Admission(max_waiting, changes.append)
    made.engine_ready(max_running)
    return made, changes


def test_running_and_waiting_places_are_given_out_then_the_queue_is_full():
    gate, _ = admission()
    tickets = [gate.admit(1, None, 0.0) for _ in range(4)]
    with pytest.raises(QueueFull) as caught:
        gate.admit(1, None, 0.0)
    assert caught.value.retry_after_s is not None
    assert 0.1 <= caught.value.retry_after_s <= 30
    tickets[0].close(1.0)
    gate.admit(1, None, 1.0)


def test_choices_count_each():
    gate, _ = admission()
    gate.admit(3, None, 0.0)
    with pytest.raises(QueueFull):
        gate.admit(2, None, 0.0)


def test_more_choices_than_there_are_places_can_never_be_taken():
    gate, _ = admission()
    with pytest.raises(InvalidParameter, match="at most 4") as caught:
        gate.admit(5, None, 0.0)
    assert caught.value.field == "n"


def test_the_time_to_wait_follows_how_long_requests_took():
    gate, _ = admission(max_running=1, max_waiting=0)
    for _ in range(100):
        gate.admit(1, None, 0.0).close(20.0)
    gate.admit(1, None, 0.0)
    with pytest.raises(QueueFull) as caught:
        gate.admit(1, None, 0.0)
    assert caught.value.retry_after_s is not None
    assert 19 < caught.value.retry_after_s <= 20


def test_a_request_is_counted_before_the_engine_hears_of_it():
    gate, changes = admission()
    ticket = gate.admit(2, "d", 0.0)
    assert (gate.active_choices, gate.in_flight("d"), changes) == (2, 1, ["d"])
    ticket.tokenized(10)
    assert gate.unseen_tokens == 20


def test_prompt_tokens_count_until_the_engines_own_figures_have_them():
    gate, _ = admission()
    ticket = gate.admit(1, None, 0.0)
    ticket.tokenized(10)
    gate.engine_frame()
    gate.engine_frame()
    assert gate.unseen_tokens == 10, "not submitted yet"
    ticket.submitted()
    gate.engine_frame()
    assert gate.unseen_tokens == 10, "that frame may have been on its way already"
    gate.engine_frame()
    assert gate.unseen_tokens == 0


@given(st.lists(st.tuples(st.sampled_from(["admit", "tokenize", "submit", "done", "close", "frame"]),
                          st.integers(0, 3)), max_size=40))  # fmt: skip
def test_whatever_happens_nothing_is_left_when_all_tickets_are_closed(steps):
    gate, _ = admission(4, 4)
    tickets = []
    for action, number in steps:
        if action == "admit":
            try:
                tickets.append(gate.admit(number + 1, f"digest{number}", 0.0))
            except QueueFull:
                continue
        elif action == "frame":
            gate.engine_frame()
        elif tickets:
            ticket = tickets[number % len(tickets)]
            {
                "tokenize": lambda t: t.tokenized(7),
                "submit": lambda t: t.submitted(),
                "done": lambda t: t.choice_done(),
                "close": lambda t: t.close(1.0),
            }[action](ticket)
        assert gate.active_choices >= 0
        assert gate.unseen_tokens >= 0
    for ticket in tickets:
        ticket.close(2.0)
        ticket.close(2.0)
    assert (gate.num_tickets, gate.active_choices, gate.unseen_tokens, gate.in_flight("d")) == (0, 0, 0, 0)
    gate.admit(8, None, 0.0)
