"""How many requests may be in flight: admission per tenant and per router. Pure bookkeeping, no clock, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from loraplex.errors import ResourceExhausted

RETRY_AFTER_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Greatest numbers of requests in flight."""

    router: int = 1024
    tenant: int = 1024


@dataclass(slots=True)
class Ticket:
    """Admission of some requests. `close` gives the places back; closing twice gives them back once."""

    _owner: Admission
    tenant: str
    num_requests: int
    _open: bool = field(default=True)

    def close(self) -> None:
        """Give the places back."""
        if self._open:
            self._open = False
            self._owner.release(self)


class Admission:
    """Counts the requests in flight of one router."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._by_tenant: dict[str, int] = {}
        self._total = 0

    @property
    def in_flight(self) -> int:
        """Requests in flight, of all tenants."""
        return self._total

    def admit(self, tenant: str, num_requests: int = 1) -> Ticket:
        """Take places for `num_requests`. Raises ResourceExhausted with a hint when to come back."""
        of_tenant = self._by_tenant.get(tenant, 0)
        for scope, held, limit in (
            ("tenant", of_tenant, self._limits.tenant),
            ("router", self._total, self._limits.router),
        ):
            if held + num_requests > limit:
                raise ResourceExhausted(
                    f"{held} requests of this {scope} are in flight and at most {limit} may be; try again later",
                    retry_after_s=RETRY_AFTER_S,
                    scope=scope,
                    limit=limit,
                    in_flight=held,
                )
        self._by_tenant[tenant] = of_tenant + num_requests
        self._total += num_requests
        return Ticket(self, tenant, num_requests)

    def release(self, ticket: Ticket) -> None:
        """Take a ticket's places back; for the ticket, which does it once."""
        self._total -= ticket.num_requests
        left = self._by_tenant[ticket.tenant] - ticket.num_requests
        if left:
            self._by_tenant[ticket.tenant] = left
        else:
            del self._by_tenant[ticket.tenant]
