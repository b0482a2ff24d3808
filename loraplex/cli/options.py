"""Options and arguments that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from loraplex.calls import DEFAULT_REGISTRY, DEFAULT_ROUTER


def check_address(value: str) -> str:
    """Return `host:port` as it is. Raises typer.BadParameter for anything else."""
    host, _, port = value.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) <= 65535:
        raise typer.BadParameter(f"{value!r} is not HOST:PORT, for example 127.0.0.1:50050")
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
