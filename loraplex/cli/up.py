"""`loraplex up`: a local cluster in the foreground."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from loraplex.cli import output
from loraplex.cli.base_source import Base, resolve_base
from loraplex.cli.board import LineBoard, make_board
from loraplex.cli.bring_up import adapter_folders, bring_up
from loraplex.cli.cluster import Cluster, ClusterPlan, DedicatedWorker, running
from loraplex.cli.folders import default_state_dir, named
from loraplex.cli.options import Json
from loraplex.cli.ports import claim_ports
from loraplex.cli.signals import StopSignals
from loraplex.cli.tree import find_tree
from loraplex.cli.workers import computes
from loraplex.client import AsyncClient
from loraplex.errors import FailedPrecondition, InvalidParameter
from loraplex.folder_lock import FolderLock
from loraplex.records import Model, Worker

_LOCK: Final = "up.lock"
_MOST_WORKERS: Final = 64
_DEFAULT_PORTS: Final = ("127.0.0.1:50050", "127.0.0.1:50051")


class Dtype(StrEnum):
    """What a worker computes in."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


def up(
    base: Annotated[
        str | None,
        typer.Option("--base", metavar="DIR|HUB-ID", help="Base model. Default: the demo base, fetched once."),
    ] = None,
    base_id: Annotated[
        str | None, typer.Option("--base-id", metavar="ID", help="Its name. Default: hub id or folder name.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="What the workers keep weights and KV cache in.")] = Dtype.AUTO,
    workers: Annotated[int, typer.Option(min=1, max=_MOST_WORKERS, metavar="N", help="How many workers.")] = 1,
    dedicated: Annotated[
        list[str] | None,
        typer.Option(
            "--dedicated",
            metavar="NAME[=N]",
            help="Start N more workers (1) for one adapter alone, merged into the base; may be given again.",
            show_default=False,
        ),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option("--state", metavar="DIR", help="State and logs. Default: ~/.local/state/loraplex."),
    ] = None,
    demo_adapters: Annotated[
        bool, typer.Option("--demo-adapters", help="Register the adapters of examples/adapters.")
    ] = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow an address that others can reach without a cluster token.")
    ] = False,
    router_port: Annotated[int, typer.Option(metavar="PORT", help="Router, gRPC; 0 picks a free one.")] = 50050,
    http_port: Annotated[int, typer.Option(metavar="PORT", help="Router, HTTP.")] = 8080,
    registry_port: Annotated[int, typer.Option(metavar="PORT", help="Registry.")] = 50051,
    worker_port: Annotated[int, typer.Option(metavar="PORT", help="First worker; the others follow.")] = 50052,
    admin_port: Annotated[
        int, typer.Option(metavar="PORT", help="Registry's probes and metrics, HTTP; each worker takes the next.")
    ] = 9051,
    drain_s: Annotated[
        float, typer.Option("--drain", min=0.0, metavar="SECONDS", help="Time for streams to finish when stopped.")
    ] = 10.0,
    ready_timeout_s: Annotated[
        float, typer.Option("--ready-timeout", min=1.0, metavar="SECONDS", help="Time to load the base.")
    ] = 600.0,
    as_json: Json = False,
) -> None:
    """Run a local cluster: a registry, workers and a router. Ctrl-C stops it; a second Ctrl-C at once.

    What dies is started again. Settings that have no option here reach the services as LORAPLEX_<SERVICE>_<FIELD>.
    With --json, every event is one JSON object a line on stdout; the one named "ready" tells the addresses.
    """
    tree = find_tree()
    own = dedicated_adapters(dedicated or [])
    names = [*(f"worker-{index}" for index in range(workers)), *(f"dedicated-{index}" for index in range(len(own)))]
    wanted = [
        ("the registry", "--registry-port", registry_port),
        ("the router", "--router-port", router_port),
        ("the router's HTTP", "--http-port", http_port),
        *((name, "--worker-port", worker_port + index if worker_port else 0) for index, name in enumerate(names)),
        *(
            (f"{name}'s admin", "--admin-port", admin_port + index if admin_port else 0)
            for index, name in enumerate(["the registry", *names])
        ),
    ]
    state_dir = named(state or default_state_dir())
    try:
        claim_ports(host, wanted)  # before anything slow
    except FailedPrecondition:
        if (state_dir / _LOCK).exists():  # it is the folder's own cluster, perhaps, that has the ports
            with state_lock(state_dir).held():
                pass
        raise
    with state_lock(state_dir).held():
        chosen = resolve_base(base, base_id, (lambda _: None) if as_json else output.note)
        registry_port, router_port, http_port, *others = claim_ports(host, wanted)
        worker_ports, (registry_admin_port, *worker_admin_ports) = others[: len(names)], others[len(names) :]
        plan = ClusterPlan(
            tree=tree,
            state_dir=state_dir,
            base_folder=chosen.folder,
            dtype=dtype.value,
            host=host,
            router_port=router_port,
            http_port=http_port,
            registry_port=registry_port,
            worker_ports=tuple(worker_ports[:workers]),
            insecure=insecure,
            drain_s=drain_s,
            registry_admin_port=registry_admin_port,
            worker_admin_ports=tuple(worker_admin_ports[:workers]),
            dedicated=tuple(
                DedicatedWorker(*facts)
                for facts in zip(
                    names[workers:], own, worker_ports[workers:], worker_admin_ports[workers:], strict=True
                )
            ),
        )
        adapters = adapter_folders(tree / "examples" / "adapters") if demo_adapters else []
        if demo_adapters and not adapters:
            raise FailedPrecondition(f"--demo-adapters: {tree / 'examples' / 'adapters'} holds no adapter folder")
        board = make_board(plan.names, as_json=as_json)
        raise typer.Exit(asyncio.run(_up(plan, chosen, adapters, board, ready_timeout_s)))


def dedicated_adapters(asked: list[str]) -> list[str]:
    """Return the adapter of each dedicated worker that NAME[=N] options ask for. Raises InvalidParameter."""
    found: list[str] = []
    for text in asked:
        name, equals, number = text.partition("=")
        count = number if equals else "1"
        if not name or not (count.isascii() and count.isdigit() and 1 <= int(count) <= _MOST_WORKERS):
            raise InvalidParameter(
                f"--dedicated {text!r} is not NAME or NAME=N with N of 1 to {_MOST_WORKERS}", field="dedicated"
            )
        found += [name] * int(count)
    return found


def state_lock(state_dir: Path) -> FolderLock:
    """Return the lock by which one `loraplex up` at a time has a state folder."""
    return FolderLock(
        state_dir,
        "the state folder",
        "choose another folder with --state",
        file_name=_LOCK,
        needs_space=True,  # logs go there, and who reads them wonders where they are
    )


async def _up(plan: ClusterPlan, base: Base, adapters: list[Path], board: LineBoard, ready_timeout_s: float) -> int:
    signals = StopSignals()
    with board:
        board.say(f"base model {base.base_id} from {base.folder}")
        board.say(f"logs in {plan.log_dir}")
        async with running(plan, board.update) as cluster:
            signals.on_second = cluster.kill
            await signals.unless_asked(_serve(plan, cluster, base, adapters, board, ready_timeout_s))
            board.say(f"stopping; streams have {plan.drain_s:g} s to finish, a second Ctrl-C ends them at once")
        board.event("stopped", {})
    return signals.exit_code


async def _serve(
    plan: ClusterPlan, cluster: Cluster, base: Base, adapters: list[Path], board: LineBoard, ready_timeout_s: float
) -> None:
    async with AsyncClient(plan.router, plan.registry) as client:
        _, models, workers = await bring_up(plan, cluster, client, base, adapters, board.say, timeout_s=ready_timeout_s)
    board.settle()
    board.event(
        "ready",
        {
            "router": plan.router,
            "http": plan.http,
            "registry": plan.registry,
            "workers": plan.workers,
            "compute": {
                worker.worker_id: {
                    "device": worker.device,
                    "dtype": worker.dtype,
                    "base_quantization": worker.base_quantization,
                }
                for worker in workers
            },
            "admin": plan.admin,
            "state_dir": str(plan.state_dir),
            "base_id": base.base_id,
            "models": [model.name for model in models],
        },
    )
    _greet(plan, base, models, workers, board)
    await asyncio.Event().wait()  # until our owner cancels us


def _greet(plan: ClusterPlan, base: Base, models: list[Model], workers: list[Worker], board: LineBoard) -> None:
    adapters = [model.name for model in models if model.parent]
    lines = [
        "",
        "Loraplex is ready.",
        f"  gRPC      {plan.router}",
        f"  HTTP      {plan.http}/v1 (OpenAI-compatible)",
        f"  registry  {plan.registry}",
        f"  admin     {', '.join(f'{name} {url}' for name, url in plan.admin.items())} (/readyz, /metrics)",
        f"  workers   {', '.join(f'{worker.worker_id} ({computes(worker) or worker.state})' for worker in workers)}",
        f"  models    {', '.join([base.base_id, *adapters])}",
    ]
    if (plan.router, plan.registry) != _DEFAULT_PORTS:
        lines += ["", f"  export LORAPLEX_ROUTER={plan.router} LORAPLEX_REGISTRY={plan.registry}"]
    lines += ["", f'  loraplex generate {adapters[0] if adapters else base.base_id} "Hello"']
    if not adapters:
        lines += ["  loraplex adapter add NAME PEFT-FOLDER"]
    board.say("\n".join([*lines, "", "Ctrl-C stops it."]))
