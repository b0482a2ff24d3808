"""A local cluster of registry, workers and router: what to run, and running it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from loraplex.cli.ports import connectable
from loraplex.cli.process import ProcessSpec, ServiceProcess, Status
from loraplex.errors import DeadlineExceeded

_KILL_AFTER_DRAIN_S: Final = 5.0
_STOP_ORDER: Final = ("router", "worker", "registry")


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """All that a local cluster is made of. Every port is a real one (see ports.claim_ports)."""

    tree: Path
    state_dir: Path
    base_folder: Path
    dtype: str
    host: str
    router_port: int
    http_port: int
    registry_port: int
    worker_ports: tuple[int, ...]
    insecure: bool = False
    drain_s: float = 10.0
    """Time that streams in flight get to finish when the cluster stops."""
    registry_admin_port: int = 0
    """Where the registry's probes and metrics are; 0 lets it pick a free port."""
    worker_admin_ports: tuple[int, ...] = ()
    """The same for each worker; those left out pick free ports."""
    worker_options: tuple[str, ...] = ()
    """What every worker is told besides, as on its command line."""

    @property
    def router(self) -> str:
        """Where clients reach the router over gRPC."""
        return f"{connectable(self.host)}:{self.router_port}"

    @property
    def http(self) -> str:
        """Where clients reach the router over HTTP, without a path."""
        return f"http://{connectable(self.host)}:{self.http_port}"

    @property
    def registry(self) -> str:
        """Where the registry is."""
        return f"{connectable(self.host)}:{self.registry_port}"

    @property
    def workers(self) -> tuple[str, ...]:
        """Where the workers are."""
        return tuple(f"{connectable(self.host)}:{port}" for port in self.worker_ports)

    @property
    def admin(self) -> dict[str, str]:
        """Where each process has /livez, /readyz, /metrics and /debug/resources, by its name."""
        known = {
            "registry": self.registry_admin_port,
            **{f"worker-{index}": port for index, port in enumerate(self.worker_admin_ports)},
        }
        urls = {name: f"http://{connectable(self.host)}:{port}" for name, port in known.items() if port}
        return {**urls, "router": self.http}

    @property
    def log_dir(self) -> Path:
        """Where each process has its log."""
        return self.state_dir / "logs"

    def specs(self) -> list[ProcessSpec]:
        """Return the processes, in the order they are shown."""
        # Nobody balances load over a local cluster, so workers and router (below) give no notice before they drain.
        drain = ("--drain-timeout-s", f"{self.drain_s:g}")
        common = ("--host", self.host, *(("--insecure",) if self.insecure else ()), *drain)
        registry = ("registry", *common, "--port", str(self.registry_port), *_admin(self.registry_admin_port))
        specs = [
            ProcessSpec(
                name="registry",
                role="registry",
                command=(*registry, "--state-dir", str(self.state_dir / "registry"), *_base_dirs(self.base_folder)),
                address=self.registry,
                log_file=self.log_dir / "registry.log",
                cwd=self.tree,
            )
        ]
        admin_ports = (*self.worker_admin_ports, *[0] * len(self.worker_ports))
        for index, port in enumerate(self.worker_ports):
            name = f"worker-{index}"
            ports = ("--port", str(port), *_admin(admin_ports[index]))
            worker = ("worker", *common, *ports, "--worker-id", name, "--registry", self.registry)
            where = ("--base-dir", str(self.base_folder), "--cache-dir", str(self.state_dir / name))
            specs.append(
                ProcessSpec(
                    name=name,
                    role="worker",
                    command=(*worker, *where, "--dtype", self.dtype, "--drain-notice-s", "0", *self.worker_options),
                    address=self.workers[index],
                    log_file=self.log_dir / f"{name}.log",
                    cwd=self.tree,
                )
            )
        router = ("router", *common, "--port", str(self.router_port), "--http-port", str(self.http_port))
        peers = ("--registry", self.registry, "--workers", ",".join(self.workers))
        specs.append(
            ProcessSpec(
                name="router",
                role="router",
                command=(*router, *peers, "--drain-delay-s", "0"),
                address=self.router,
                log_file=self.log_dir / "router.log",
                cwd=self.tree,
            )
        )
        return specs


def _base_dirs(folder: Path) -> tuple[str, ...]:
    """Let the registry read the base's weights, for DoRA; a comma would part the path in two."""
    return () if "," in str(folder) else ("--base-dirs", str(folder))


def _admin(port: int) -> tuple[str, str]:
    return ("--admin-port", str(port))


class Cluster:
    """The running processes of a plan."""

    def __init__(self, processes: Sequence[ServiceProcess], patience_s: float) -> None:
        self._processes = {process.spec.name: process for process in processes}
        self._patience_s = patience_s

    async def wait_ready(self, name: str, timeout_s: float) -> None:
        """Wait until a process takes requests. Raises DeadlineExceeded, naming its log."""
        process = self._processes[name]
        try:
            await asyncio.wait_for(process.ready.wait(), timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{name} was not ready within {timeout_s:g} s; its log {process.spec.log_file} may say why"
            ) from None

    async def wait_all_ready(self, timeout_s: float) -> None:
        """Wait until every process takes requests. Raises DeadlineExceeded, naming the first that does not."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        for name in self._processes:
            await self.wait_ready(name, max(0.001, deadline - asyncio.get_running_loop().time()))

    async def stop(self) -> None:
        """Stop all: the router first, so that nothing new comes in, the registry last."""
        for role in _STOP_ORDER:
            same = [process for process in self._processes.values() if process.spec.role == role]
            await asyncio.gather(*(process.stop(self._patience_s) for process in same))

    def kill(self) -> None:
        """Kill all at once."""
        for process in self._processes.values():
            process.kill()


@asynccontextmanager
async def running(plan: ClusterPlan, listener: Callable[[Status], None]) -> AsyncIterator[Cluster]:
    """Run a cluster for as long as the block lasts; nothing of it is left afterwards.

    A process that cannot start ends the block by raising FailedPrecondition out of it.
    """
    for folder in (plan.state_dir, plan.log_dir):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for spec in plan.specs():
        if spec.log_file.exists():
            spec.log_file.replace(spec.log_file.with_suffix(".log.1"))
    processes = [ServiceProcess(spec, listener) for spec in plan.specs()]
    cluster = Cluster(processes, plan.drain_s + _KILL_AFTER_DRAIN_S)
    try:
        async with asyncio.TaskGroup() as tasks:
            for process in processes:
                tasks.create_task(process.supervise(), name=process.spec.name)
            try:
                yield cluster
            finally:
                try:
                    await cluster.stop()
                finally:
                    cluster.kill()
    except BaseExceptionGroup as failures:
        raise _first(failures) from None


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
