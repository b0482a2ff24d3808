"""The plans that the runner was given: what it was told of each request, and what is still in flight. Pure.

Plans are answered in the order in which they were made. What ends while one is in flight keeps its blocks and adapter
reference until the last of them is answered, since steps may still read and write them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from worker.engine.growth import Shares
from worker.engine.plan import ComparisonStep, NewRequest, StepPlan
from worker.engine.request import Request

MAX_IN_FLIGHT: Final = 2
"""Plans that may wait for their outcome: a step that runs, and the next."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A plan whose outcome is not known yet."""

    plan: StepPlan
    leaving: list[Request] = field(default_factory=list)
    """Requests that ended after it was made; the step may still use what they hold."""


class PlansInFlight:
    """Makes plans, and keeps those in flight, the oldest first; `len` is how many they are."""

    def __init__(self) -> None:
        self._in_flight: deque[_InFlight] = deque()
        self._ended: list[int] = []  # known to the runner, which is told with the next plan
        self._step = 0

    def __len__(self) -> int:
        return len(self._in_flight)

    @property
    def oldest(self) -> StepPlan | None:
        """The plan that is answered next."""
        return self._in_flight[0].plan if self._in_flight else None

    def make(self, shares: Shares, comparison: ComparisonStep | None) -> StepPlan:
        """Make the next step's plan; it is in flight from now on."""
        self._step += 1
        new: list[NewRequest] = []
        for request, _ in shares:
            if not request.announced:
                request.announced = True
                new.append(request.as_new())
        sequences = tuple([request.next_step(count) for request, count in shares])
        plan = StepPlan(self._step, tuple(new), sequences, tuple(self._ended), comparison)
        self._ended.clear()
        self._in_flight.append(_InFlight(plan))
        return plan

    def end(self, request: Request) -> bool:
        """Note that a request has ended; returns whether a step in flight may still use what it holds."""
        if request.announced:
            self._ended.append(request.request_id)
        if not self._in_flight:
            return False
        self._in_flight[-1].leaving.append(request)
        return True

    def answered(self, plan: StepPlan) -> list[Request]:
        """Take a plan out of flight; returns who ended since it was made, before the next: what they hold is free now.

        Raises ValueError where another is to be answered.
        """
        if plan is not self.oldest:
            raise ValueError(f"step {plan.step} is not the one to be answered")
        return self._in_flight.popleft().leaving

    def tell_again(self, plan: StepPlan, is_announced: Callable[[int], bool]) -> None:
        """Have the runner told once more of the ends in a plan that failed: nobody knows whether it has taken note.

        Those whom a later plan has announced again are going on, and it must not be told of them.
        """
        self._ended[:0] = [request_id for request_id in plan.ended_request_ids if not is_announced(request_id)]
