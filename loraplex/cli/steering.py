"""`loraplex adapter` commands that say where adapters shall be: pin, unpin, prefetch, unload."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer
from rich.markup import escape

from loraplex.cli import output
from loraplex.cli.adapters import Name
from loraplex.cli.options import REGISTRY, ROUTER, Json, Registry, Router
from loraplex.client import Client
from loraplex.pins import ALL, parse_replicas
from loraplex.records import AdapterOutcome

WorkerId = Annotated[
    str, typer.Option("--worker", metavar="ID", help="Which worker; see `loraplex worker list`.", show_default=False)
]


def _replicas(text: str) -> str:
    try:
        parse_replicas(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return text


def pin(
    name: Name,
    replicas: Annotated[
        str,
        typer.Option(
            "--replicas",
            metavar="N|all",
            help="On how many workers of its base; no more than there are.",
            callback=_replicas,
        ),
    ] = "1",
    registry: Registry = REGISTRY,
    as_json: Json = False,
) -> None:
    """Have workers keep an adapter whatever the demand. A new version takes the old one's place.

    The registry keeps the pin, routers see to it; `loraplex worker list` tells where the adapter is, `loraplex advice`
    why a worker does not keep it.
    """
    with Client(registry=registry) as client:
        done = client.pin_adapter(name, parse_replicas(replicas))
    if as_json:
        output.print_json(done)
        return
    where = "all workers" if replicas == ALL else f"{replicas} worker{'s' if replicas != '1' else ''}"
    what = "is pinned" if done.changed else "is pinned already"
    output.stdout().print(f"[bold]{escape(name)}[/] {what} to {where} of base {escape(done.adapter.base_id)}")


def unpin(name: Name, registry: Registry = REGISTRY, as_json: Json = False) -> None:
    """Let workers decide again how long they keep an adapter."""
    with Client(registry=registry) as client:
        done = client.pin_adapter(name, 0)
    if as_json:
        output.print_json(done)
        return
    output.stdout().print(f"[bold]{escape(name)}[/] is {'no longer' if done.changed else 'not'} pinned")


def prefetch(
    name: Name,
    worker_id: WorkerId = "",
    num_workers: Annotated[
        int, typer.Option("--replicas", metavar="N", min=1, help="How many workers the router takes, without --worker.")
    ] = 1,
    device: Annotated[bool, typer.Option("--device", help="On to the device too, if there is room.")] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Return when it is on the device, whatever has to make room for it.")
    ] = False,
    router: Router = ROUTER,
    as_json: Json = False,
) -> None:
    """Have workers fetch an adapter ahead of its requests: into their disk cache, or on to the device.

    The router takes the workers that requests would go to.
    """
    with Client(router) as client:
        if wait:
            outcomes = client.load_adapter(name, worker_id=worker_id, num_workers=num_workers)
        else:
            outcomes = client.prefetch_adapter(name, worker_id=worker_id, num_workers=num_workers, to_device=device)
    _tell(name, outcomes, _loaded if wait else _fetched, as_json=as_json)


def unload(
    name: Name,
    worker_id: WorkerId = "",
    from_disk: Annotated[bool, typer.Option("--from-disk", help="Out of host memory and the disk cache too.")] = False,
    router: Router = ROUTER,
    as_json: Json = False,
) -> None:
    """Have a worker, or all that hold it, take an adapter off their device. What is in use or pinned stays.

    The next request for it loads it again.
    """
    with Client(router) as client:
        outcomes = client.unload_adapter(name, worker_id=worker_id, from_disk=from_disk)
    _tell(name, outcomes, _unloaded, as_json=as_json)
    if not outcomes and not as_json:
        output.note(f"no worker holds {name}")


def _fetched(outcome: AdapterOutcome) -> str:
    return (
        f"on its way to {outcome.worker_id}" if outcome.tier == "source" else f"{outcome.tier} of {outcome.worker_id}"
    )


def _loaded(outcome: AdapterOutcome) -> str:
    if outcome.tier == "device":
        return f"on the device of {outcome.worker_id} already"
    return f"loaded on {outcome.worker_id} from {outcome.tier} in {output.duration(outcome.load_s or 0.0)}"


def _unloaded(outcome: AdapterOutcome) -> str:
    return (
        f"unloaded from {outcome.worker_id}, was on {outcome.tier}" if outcome.tier else f"not on {outcome.worker_id}"
    )


def _tell(name: str, outcomes: list[AdapterOutcome], words: Callable[[AdapterOutcome], str], *, as_json: bool) -> None:
    """Print an outcome per worker. Exits with 1 where one refused."""
    if as_json:
        output.print_json({"name": name, "outcomes": outcomes})
    for outcome in outcomes:
        if outcome.error_reason:
            output.stderr().print(f"{escape(outcome.worker_id)}: {escape(outcome.error)}")
        elif not as_json:
            output.stdout().print(f"[bold]{escape(name)}[/]: {escape(words(outcome))}")
    if any(outcome.error_reason for outcome in outcomes):
        raise typer.Exit(1)


def add_to(group: typer.Typer) -> None:
    """Add the commands to the group `adapter`."""
    for command in (pin, unpin, prefetch, unload):
        group.command()(command)
