"""Private clusters to measure: registry, worker and router on free ports, with adapters registered, gone afterwards."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.record import TREE
from loraplex.cli.base_source import Base
from loraplex.cli.board import LineBoard
from loraplex.cli.bring_up import bring_up
from loraplex.cli.cluster import ClusterPlan, running
from loraplex.cli.ports import claim_ports
from loraplex.cli.process import Status
from loraplex.client import AsyncClient
from loraplex.records import AdapterVersion
from loraplex.worker.v1 import worker_pb2

_READY_S: Final = 600.0  # kernels may have to be compiled


@dataclass(frozen=True, slots=True)
class Served:
    """A running cluster: its OpenAI-compatible front, where its parts are, and what it serves."""

    url: str
    router: str
    """host:port over gRPC, as are the next two."""
    registry: str
    worker: str
    worker_admin: str
    """Its admin port's URL."""
    worker_pid: int
    base: str
    adapters: tuple[str, ...]


@asynccontextmanager
async def serving(
    base: Base, adapters: Sequence[Path], state_dir: Path, *, dtype: str, worker_options: Sequence[str] = ()
) -> AsyncIterator[Served]:
    """Run a cluster with one worker, which serves the base and the PEFT folders `adapters`."""
    router, http, registry, worker, admin = claim_ports("127.0.0.1", [("the benchmark", "--port", 0)] * 5)
    plan = ClusterPlan(
        tree=TREE,
        state_dir=state_dir,
        base_folder=base.folder,
        dtype=dtype,
        host="127.0.0.1",
        router_port=router,
        http_port=http,
        registry_port=registry,
        worker_ports=(worker,),
        worker_admin_ports=(admin,),
        worker_options=tuple(worker_options),
    )
    board = LineBoard()
    pids: dict[str, int | None] = {}

    def note(status: Status) -> None:
        pids[status.name] = status.pid
        board.update(status)

    async with running(plan, note) as cluster, AsyncClient(plan.router, plan.registry) as client:
        await bring_up(plan, cluster, client, base, list(adapters), board.say, timeout_s=_READY_S)
        names = tuple(folder.name for folder in adapters)
        pid = pids["worker-0"]
        if pid is None:
            raise RuntimeError("the worker has ended")
        yield Served(
            plan.http,
            plan.router,
            plan.registry,
            plan.workers[0],
            plan.admin["worker-0"],
            pid,
            base.base_id,
            names,
        )


def resolved(version: AdapterVersion) -> worker_pb2.ResolvedAdapter:
    """Return what a router tells workers of a version."""
    return worker_pb2.ResolvedAdapter(
        version_digest=version.version_digest,
        artifact_digest=version.artifact_digest,
        rank=version.rank,
        format=version.format,
        artifact_bytes=version.artifact_bytes,
    )
