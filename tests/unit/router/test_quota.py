"""Admission: limits hold, places come back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.errors import ResourceExhausted
from router.quota import Admission, Limits, Ticket


@pytest.mark.parametrize(
    ("limits", "held", "asked", "scope"),
    [
        (Limits(router=10, tenant=2), [("a", 2)], ("a", 1), "tenant"),
        (Limits(router=3, tenant=2), [("a", 2)], ("b", 2), "router"),
        (Limits(router=10, tenant=2), [], ("a", 3), "tenant"),
    ],
)
def test_beyond_a_limit_is_refused_with_a_hint(
    limits: Limits, held: list[tuple[str, int]], asked: tuple[str, int], scope: str
) -> None:
    admission = Admission(limits)
    for tenant, count in held:
        admission.admit(tenant, count)
    before = admission.in_flight
    with pytest.raises(ResourceExhausted) as caught:
        admission.admit(*asked)
    assert caught.value.metadata["scope"] == scope
    assert caught.value.retry_after_s == 1.0
    assert admission.in_flight == before


@given(st.lists(st.tuples(st.sampled_from(["admit", "close"]), st.sampled_from("ab"), st.integers(1, 4)), max_size=40))
def test_no_place_is_lost_or_given_twice(steps: list[tuple[str, str, int]]) -> None:
    limits = Limits(router=6, tenant=4)
    admission = Admission(limits)
    tickets: list[Ticket] = []
    for step, tenant, count in steps:
        if step == "admit":
            of_tenant = sum(ticket.num_requests for ticket in tickets if ticket.tenant == tenant)
            fits = of_tenant + count <= limits.tenant and admission.in_flight + count <= limits.router
            try:
                tickets.append(admission.admit(tenant, count))
                assert fits
            except ResourceExhausted:
                assert not fits
        elif tickets:
            ticket = tickets.pop(count % len(tickets))
            ticket.close()
            ticket.close()
        assert admission.in_flight == sum(ticket.num_requests for ticket in tickets)
