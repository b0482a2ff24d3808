"""`loraplex adapter` commands that say where adapters shall be: pin, unpin."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from loraplex.cli import output
from loraplex.cli.adapters import Name
from loraplex.cli.options import REGISTRY, Json, Registry
from loraplex.client import Client
from loraplex.pins import ALL, parse_replicas


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

    The registry keeps the pin, routers see to it; `loraplex worker list` tells where the adapter is.
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


def add_to(group: typer.Typer) -> None:
    """Add the commands to the group `adapter`."""
    for command in (pin, unpin):
        group.command()(command)
