"""`loraplex worker`: list."""

from __future__ import annotations

from loraplex.cli import output
from loraplex.cli.app import new_group
from loraplex.cli.options import ROUTER, Json, Router
from loraplex.client import Client
from loraplex.records import Worker

app = new_group("Look at the workers.")


@app.command("list")
def list_(router: Router = ROUTER, as_json: Json = False) -> None:
    """List the workers as the router sees them, with the adapters each holds."""
    with Client(router) as client:
        workers = list(client.list_workers())
    if as_json:
        output.print_json({"workers": workers})
        return
    output.print_table(
        ["worker", "address", "state", "#running", "#waiting", "#decode tok/s", "#free KV", "adapters"],
        [
            (
                worker.worker_id or "?",
                worker.address,
                worker.state,
                str(worker.running_requests),
                str(worker.waiting_requests),
                f"{worker.decode_tokens_per_second:.1f}",
                f"{worker.free_blocks}/{worker.total_blocks}",
                worker.error or _adapters(worker),
            )
            for worker in workers
        ],
        empty="the router knows no worker",
    )


def _adapters(worker: Worker) -> str:
    return ", ".join(
        f"{'/'.join(entry.names) or output.short(entry.artifact_digest)} ({'loading' if entry.loading else entry.tier})"
        for entry in worker.adapters
    )
