"""How many requests a worker takes, and what it has taken: the front end's own count, exact at any moment.

Pure bookkeeping without I/O; time is an argument. A ticket stands for one RPC with its `n` choices. It is counted from
admission, before the engine hears of it, so that status never lags behind what was promised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

from loraplex.errors import InvalidParameter, QueueFull

_FIRST_GUESS_S: Final = 1.0
_SMOOTHING: Final = 0.1
_RETRY_AFTER_S: Final = (0.1, 30.0)
_FRAMES_UNTIL_SEEN: Final = 2
"""The engine's own figures contain a request at the latest in the second frame that comes after its submission."""


class Ticket:
    """One admitted RPC. Owned by its handler, which closes it whatever happens; closing twice is harmless."""

    __slots__ = (
        "_admission", "_open", "active_choices", "admitted_s", "artifact_digest", "choices", "typical", "unseen_tokens",
    )  # fmt: skip

    def __init__(
        self, admission: Admission, choices: int, artifact_digest: str | None, now: float, *, typical: bool
    ) -> None:
        self._admission = admission
        self._open = True
        self.choices = choices
        self.active_choices = choices
        """Choices that the engine has yet to finish."""
        self.artifact_digest = artifact_digest
        self.admitted_s = now
        self.typical = typical
        """Whether its time tells how long others will take."""
        self.unseen_tokens = 0
        """Prompt tokens, of all choices, that the engine's figures do not contain yet."""

    def tokenized(self, prompt_tokens: int) -> None:
        """Tell the length of the prompt, before the engine hears of it."""
        if self._open:
            self.unseen_tokens = prompt_tokens * self.choices
            self._admission.changed()

    def submitted(self) -> None:
        """Tell that the engine was told of all choices."""
        if self._open:
            self._admission.submitted(self)

    def choice_done(self) -> None:
        """Tell that the engine does no more for one of the choices."""
        if self._open and self.active_choices:
            self.active_choices -= 1
            self._admission.choices_done(self, 1)

    def close(self, now: float) -> None:
        """End the RPC, well or not."""
        if self._open:
            self._open = False
            self._admission.closed(self, now)


class Admission:
    """Admits up to `max_running + max_waiting` choices.

    `on_change` hears of every change, with the artifact whose requests in flight it changed, if any.
    """

    def __init__(self, max_waiting: int, on_change: Callable[[str | None], None]) -> None:
        self._max_waiting = max_waiting
        self._on_change = on_change
        self._max_running = 0
        self._tickets: set[Ticket] = set()
        self._unseen: dict[Ticket, int] = {}
        self._frames = 0
        self._choices = 0
        self._active_choices = 0
        self._in_flight: Counter[str] = Counter()
        self._service_s = _FIRST_GUESS_S

    def engine_ready(self, max_running: int) -> None:
        """Learn how many choices the engine runs at a time."""
        self._max_running = max_running

    def admit(self, choices: int, artifact_digest: str | None, now: float, *, typical: bool = True) -> Ticket:
        """Take an RPC. Raises QueueFull with a time to wait, or InvalidParameter where it could never be taken."""
        capacity = self._max_running + self._max_waiting
        if choices > capacity:
            raise InvalidParameter(f"n is {choices}; this worker takes at most {capacity} choices at a time", field="n")
        if self._choices + choices > capacity:
            low, high = _RETRY_AFTER_S
            retry_after_s = min(high, max(low, self._service_s * choices / capacity))
            raise QueueFull(
                f"{self._choices} choices are running or waiting here, {capacity} is the most; try again later",
                retry_after_s=retry_after_s,
                limit=capacity,
            )
        ticket = Ticket(self, choices, artifact_digest, now, typical=typical)
        self._tickets.add(ticket)
        self._choices += choices
        self._active_choices += choices
        if artifact_digest is not None:
            self._in_flight[artifact_digest] += 1
        self._on_change(artifact_digest)
        return ticket

    def engine_frame(self) -> None:
        """Learn that the engine reported; its figures catch up with what was submitted."""
        self._frames += 1
        for ticket, at in list(self._unseen.items()):
            if self._frames >= at:
                del self._unseen[ticket]
                ticket.unseen_tokens = 0

    @property
    def num_tickets(self) -> int:
        """RPCs in flight."""
        return len(self._tickets)

    @property
    def active_choices(self) -> int:
        """Choices that the engine has yet to finish, whether it knows of them or not."""
        return self._active_choices

    @property
    def unseen_tokens(self) -> int:
        """Prompt tokens that the engine's figures do not contain yet."""
        return sum(ticket.unseen_tokens for ticket in self._tickets)

    def in_flight(self, artifact_digest: str) -> int:
        """Return the RPCs in flight that use an artifact."""
        return self._in_flight[artifact_digest]

    # For tickets.

    def changed(self) -> None:
        """Pass on a ticket's change."""
        self._on_change(None)

    def submitted(self, ticket: Ticket) -> None:
        """Expect the ticket in the engine's figures soon."""
        self._unseen[ticket] = self._frames + _FRAMES_UNTIL_SEEN

    def choices_done(self, ticket: Ticket, count: int) -> None:
        """Count choices out of what the engine has to do."""
        self._active_choices -= count
        if not ticket.active_choices:
            self._unseen.pop(ticket, None)
            ticket.unseen_tokens = 0
        self._on_change(None)

    def closed(self, ticket: Ticket, now: float) -> None:
        """Forget a ticket."""
        self._tickets.discard(ticket)
        self._unseen.pop(ticket, None)
        self._choices -= ticket.choices
        self._active_choices -= ticket.active_choices
        ticket.active_choices = 0
        digest = ticket.artifact_digest
        if digest is not None:
            self._in_flight[digest] -= 1
            if not self._in_flight[digest]:
                del self._in_flight[digest]
        if ticket.typical:
            self._service_s += _SMOOTHING * (now - ticket.admitted_s - self._service_s)
        self._on_change(digest)
