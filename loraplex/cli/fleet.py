"""`loraplex worker list`, `loraplex models` and `loraplex version`."""

from __future__ import annotations

import platform
from importlib import metadata

import grpc

from loraplex.cli import output
from loraplex.cli.app import new_group
from loraplex.cli.options import ROUTER, Json, Router
from loraplex.client import Client
from loraplex.records import Worker

worker_app = new_group("Look at the workers.")


@worker_app.command("list")
def list_workers(router: Router = ROUTER, as_json: Json = False) -> None:
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


def version(as_json: Json = False) -> None:
    """Print the version."""
    facts = {"loraplex": metadata.version("loraplex"), "python": platform.python_version(), "grpc": grpc.__version__}
    if as_json:
        output.print_json(facts)
    else:
        output.stdout().print(f"loraplex {facts['loraplex']} (Python {facts['python']}, gRPC {facts['grpc']})")
