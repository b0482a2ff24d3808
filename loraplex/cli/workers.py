"""`loraplex worker`: list."""

from __future__ import annotations

from loraplex.cli import output
from loraplex.cli.app import new_group
from loraplex.cli.options import ROUTER, Json, Router
from loraplex.client import Client
from loraplex.records import TierUse, Worker, WorkerAdapter

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
        [
            "worker",
            "address",
            "state",
            "#running",
            "#waiting",
            "#decode tok/s",
            "#free KV",
            "computes",
            "tiers",
            "adapters",
        ],
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
                tiers(worker),
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


def tiers(worker: Worker) -> str:
    """Return how full a worker's tiers of adapters are, for people; empty where it has not said."""
    uses = (("device", worker.device_tier), ("host", worker.host_tier), ("disk", worker.disk_tier))
    return ", ".join(f"{name} {_use(use)}" for name, use in uses if use is not None)


def _use(use: TierUse) -> str:
    places = f" ({use.num_adapters}/{use.max_adapters})" if use.max_adapters else ""
    return f"{output.size(use.used_bytes)}/{output.size(use.budget_bytes)}{places}"


def _adapters(worker: Worker) -> str:
    return ", ".join(_adapter(entry, worker.dedicated_artifact_digest) for entry in worker.adapters)


def _adapter(entry: WorkerAdapter, dedicated: str) -> str:
    facts = ["loading" if entry.loading else entry.tier]
    if entry.artifact_digest == dedicated:
        facts.append("merged")
    if entry.pinned:
        facts.append("pinned")
    if entry.quarantine_reason:
        facts.append(f"refused: {entry.quarantine_reason}")
    return f"{'/'.join(entry.names) or output.short(entry.artifact_digest)} ({', '.join(facts)})"
