"""`loraplex advice`: what a router's traffic suggests to its operator."""

from __future__ import annotations

from loraplex.cli import output
from loraplex.cli.options import ROUTER, Json, Router
from loraplex.client import Client


def advice(router: Router = ROUTER, as_json: Json = False) -> None:
    """Tell what to do about the traffic that a router sees: adapters to keep, to bound, or to serve merged.

    It follows from the last minutes' requests of this router alone. Pins that workers do not keep are told first, with
    the reason. --json has the figures.
    """
    with Client(router) as client:
        found = list(client.list_advice())
    if as_json:
        output.print_json({"advice": found})
        return
    output.print_table(
        ["advice", "adapter", "worker", "because"],
        [
            (entry.kind, entry.adapter or f"all of {entry.tenant}", entry.worker_id or "-", entry.reason)
            for entry in found
        ],
        empty="nothing to advise",
    )
