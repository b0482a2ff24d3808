"""Options and arguments that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from loraplex.address import parse_address
from loraplex.calls import DEFAULT_REGISTRY, DEFAULT_ROUTER


def check_address(value: str) -> str:
    """Return `host:port` as it is. Raises typer.BadParameter for anything else."""
    try:
        parse_address(value)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return value


Router = Annotated[
    str,
    typer.Option(
        "--router",
        envvar="LORAPLEX_ROUTER",
        metavar="HOST:PORT",
        help="The router's gRPC address.",
        callback=check_address,
    ),
]
Registry = Annotated[
    str,
    typer.Option(
        "--registry",
        envvar="LORAPLEX_REGISTRY",
        metavar="HOST:PORT",
        help="The registry's gRPC address.",
        callback=check_address,
    ),
]
Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="An adapter, NAME@DIGEST-PREFIX, or a base id.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text for people.")]
Wait = Annotated[
    bool | None,
    typer.Option(
        "--wait/--no-wait",
        help="Return only when the router knows of it. Default: wait where a router can be reached.",
        show_default=False,
    ),
]

ROUTER = DEFAULT_ROUTER
REGISTRY = DEFAULT_REGISTRY
