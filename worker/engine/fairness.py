"""What each tenant has had of the engine, as virtual tokens, so that the one that had least comes first.

After Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): a counter per tenant grows by input tokens
plus twice the output tokens, divided by the tenant's weight; loads of adapters count as the input tokens that could
have been computed meanwhile. A tenant that comes back after a pause is lifted to the smallest counter of those that
wait, so that nobody saves up. Knows nothing of requests; no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

OUTPUT_WEIGHT: Final = 2
MAX_TENANTS: Final = 4096
"""Counters kept; beyond, those of absent tenants that had least are dropped, as they would be lifted anyway."""


@dataclass(slots=True)
class _Tenant:
    counter: float = 0.0
    weight: float = 1.0


class TenantCounters:
    """One counter per tenant, in virtual tokens."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}

    def counter(self, tenant: str) -> float:
        """Return what a tenant has had."""
        known = self._tenants.get(tenant)
        return known.counter if known is not None else 0.0

    def cost(self, tenant: str, input_tokens: int) -> float:
        """Return by how much input tokens raise a tenant's counter."""
        known = self._tenants.get(tenant)
        return input_tokens / known.weight if known is not None else float(input_tokens)

    def charge(self, tenant: str, *, input_tokens: float = 0, output_tokens: int = 0) -> None:
        """Count what a tenant gets."""
        known = self._tenants.get(tenant)
        if known is None:
            known = self._tenants[tenant] = _Tenant()
        known.counter += (input_tokens + OUTPUT_WEIGHT * output_tokens) / known.weight

    def set_weight(self, tenant: str, weight: float) -> None:
        """Note a tenant's weight, above 0."""
        self._tenants.setdefault(tenant, _Tenant()).weight = weight

    def lift(self, tenant: str, waiting: Iterable[str], last: str | None) -> None:
        """Lift a tenant that begins to wait to the least of those `waiting`; if none is, to the `last` one that was."""
        level = min([self.counter(other) for other in waiting], default=0.0 if last is None else self.counter(last))
        known = self._tenants.setdefault(tenant, _Tenant())
        known.counter = max(known.counter, level)

    def forget_absent(self, present: Callable[[], set[str]]) -> None:
        """Keep the number of counters bounded; those of `present` tenants stay."""
        if len(self._tenants) <= MAX_TENANTS:
            return
        staying = present()
        absent = [tenant for tenant in self._tenants if tenant not in staying]
        absent.sort(key=lambda tenant: self._tenants[tenant].counter)
        for tenant in absent[: len(self._tenants) - MAX_TENANTS // 2]:
            del self._tenants[tenant]
