"""`loraplex models`: what can be asked for."""

from __future__ import annotations

from loraplex.cli import output
from loraplex.cli.options import ROUTER, Json, Router
from loraplex.client import Client


def models(router: Router = ROUTER, as_json: Json = False) -> None:
    """List what can be asked for: base models and adapters."""
    with Client(router) as client:
        entries = list(client.list_models())
    if as_json:
        output.print_json({"models": entries})
        return
    output.print_table(
        ["model", "base", "#rank", "#size", "artifact"],
        [
            (
                entry.name,
                entry.parent,
                str(entry.rank) if entry.parent else "",
                output.size(entry.artifact_bytes) if entry.parent else "",
                output.short(entry.artifact_digest),
            )
            for entry in entries
        ],
        empty="the router serves no model; register a base with: loraplex base add DIR",
    )
