"""What an operator lets be registered: ranks, modules, how many adapters. Pure.

What is registered already stays, whatever the limits become.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from common.adapter_format.base import KINDS, kind_of
from common.adapter_format.packed import EMBEDDING, HEAD, PackedAdapter
from common.config import split_list
from common.wording import listing
from loraplex.errors import ResourceExhausted, UnsupportedAdapter

TARGET_MODULES: Final = (*KINDS, EMBEDDING, HEAD)
"""Kinds of modules that an adapter can change."""


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """What an adapter may be; `target_modules` are the kinds it may change, `max_adapters` is how many a tenant has."""

    max_rank: int
    target_modules: frozenset[str]
    max_adapters: int


def parse_target_modules(text: str) -> frozenset[str]:
    """Read `q_proj,v_proj,...`; nothing means all. Raises ValueError for what is no kind of module."""
    kinds = frozenset(split_list(text))
    if unknown := kinds.difference(TARGET_MODULES):
        raise ValueError(f"no module is called {listing(unknown)[:80]}; there are {', '.join(TARGET_MODULES)}")
    return kinds or frozenset(TARGET_MODULES)


def check_limits(adapter: PackedAdapter, limits: AdapterLimits) -> None:
    """Refuse a validated adapter that is above a limit. Raises UnsupportedAdapter, naming the field and the limit."""
    largest = max(adapter.modules, key=lambda module: module.rank, default=None)
    if largest is not None and largest.rank > limits.max_rank:
        raise UnsupportedAdapter(
            f"{largest.name} has rank {largest.rank}, and this registry takes {limits.max_rank} at most; train it with "
            "a smaller r, or have an operator raise max_rank",
            field="r",
            module=largest.name,
            rank=largest.rank,
            limit=limits.max_rank,
        )
    for field, names in (
        ("target_modules", {kind_of(module.name) for module in adapter.modules}),
        ("modules_to_save", {matrix.name for matrix in adapter.matrices}),
    ):
        if refused := names - limits.target_modules:
            raise UnsupportedAdapter(
                f"it changes {listing(refused)}, and this registry takes adapters of {listing(limits.target_modules)} "
                "only; train it without, or have an operator extend allowed_target_modules",
                field=field,
                limit=",".join(sorted(limits.target_modules)),
            )


def check_room(num_adapters: int, limits: AdapterLimits) -> None:
    """Refuse one adapter more than may be. Raises ResourceExhausted; new versions of known names are not concerned."""
    if num_adapters >= limits.max_adapters:
        raise ResourceExhausted(
            f"{num_adapters} adapters are registered and this registry keeps {limits.max_adapters} at most; delete "
            "some (loraplex adapter rm NAME), or have an operator raise max_adapters",
            field="name",
            limit=limits.max_adapters,
        )
