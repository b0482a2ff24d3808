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
        ["worker", "address", "state", "#running", "#waiting", "#decode tok/s", "#free KV", "computes", "adapters"],
        [
            (
                worker.worker_id or "?",
                worker.address,
                worker.state,
                str(worker.running_requests),
                str(worker.waiting_requests),
                f"{worker.decode_tokens_per_second:.1f}",
                f"{worker.free_blocks}/{worker.total_blocks}",
                computes(worker),
                worker.error or _adapters(worker),
            )
            for worker in workers
        ],
        empty="the router knows no worker",
    )


def computes(worker: Worker) -> str:
    """Return what a worker computes on and in, for people; empty where it has not said."""
    if not worker.device:
        return ""
    quantized = worker.base_quantization not in ("", "none")
    return f"{worker.device} {worker.dtype}" + (f", {worker.base_quantization} base" if quantized else "")


def _adapters(worker: Worker) -> str:
    return ", ".join(
        f"{'/'.join(entry.names) or output.short(entry.artifact_digest)} ({'loading' if entry.loading else entry.tier})"
        for entry in worker.adapters
    )
