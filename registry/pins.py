"""Which adapters workers shall keep whatever the demand: by the configuration's list, and by operators. Pure.

A pin is of the name and stays over its versions. The list pins what is not pinned otherwise, at the registry's start
and when such an adapter is registered. Another number that an operator gives stays; while a name is on the list it
cannot be unpinned; one that is taken off stays pinned until an operator unpins it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from common.config import split_list
from loraplex.errors import FailedPrecondition, InvalidName, InvalidParameter
from loraplex.pins import PIN_ON_ALL, parse_replicas
from registry.domain import AdapterRecord, check_adapter_name


def parse_pinned(text: str) -> dict[str, int]:
    """Read `NAME[=WORKERS],...` as numbers of workers by name, 1 where none is given.

    Raises ValueError, saying what is wrong with it.
    """
    pinned: dict[str, int] = {}
    for part in split_list(text):
        name, equals, replicas = part.partition("=")
        try:
            check_adapter_name(name)
        except InvalidName as error:
            raise ValueError(error.message) from error
        if name in pinned:
            raise ValueError(f"names {name} twice")
        pinned[name] = parse_replicas(replicas) if equals else 1
    return pinned


def with_listed_pin(adapter: AdapterRecord, listed: Mapping[str, int]) -> AdapterRecord:
    """Return the adapter pinned as the list says; itself where it is pinned already, or not on the list."""
    replicas = listed.get(adapter.name, 0)
    return adapter if adapter.pin_replicas or not replicas else replace(adapter, pin_replicas=replicas)


def with_pin(adapter: AdapterRecord, replicas: int, listed: Mapping[str, int]) -> AdapterRecord:
    """Return the adapter as an operator pins it; 0 unpins. Itself where that changes nothing.

    Raises InvalidParameter, and FailedPrecondition for unpinning what is on the list.
    """
    if not 0 <= replicas <= PIN_ON_ALL:
        raise InvalidParameter(
            f"pin_replicas is {replicas}; give 0 to {PIN_ON_ALL}, which is all", field="pin_replicas", limit=PIN_ON_ALL
        )
    if not replicas and adapter.name in listed:
        raise FailedPrecondition(
            f"{adapter.name} is in the registry's pinned_adapters; take it off that list and restart it first",
            field="name",
            setting="pinned_adapters",
        )
    return adapter if adapter.pin_replicas == replicas else replace(adapter, pin_replicas=replicas)
