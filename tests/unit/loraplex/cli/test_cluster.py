"""What a local cluster runs, and that nothing of it is left; against small real processes that serve gRPC health."""

from __future__ import annotations

import asyncio
import fcntl
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from loraplex.cli.cluster import ClusterPlan, DedicatedWorker, running
from loraplex.cli.ports import claim_ports
from loraplex.cli.process import Status
from loraplex.cli.up import state_lock
from loraplex.errors import DeadlineExceeded, FailedPrecondition

SERVICE = """
import signal, sys
from concurrent import futures
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
servicer = health.HealthServicer()
server = grpc.server(futures.ThreadPoolExecutor(2))
health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
server.add_insecure_port("127.0.0.1:" + sys.argv[sys.argv.index("--port") + 1])
server.start()
servicer.set("", health_pb2.HealthCheckResponse.SERVING)
signal.sigwait([signal.SIGTERM])
"""


def make_plan(folder: Path, **sources: str) -> ClusterPlan:
    for name in ("registry", "router", "worker"):
        (folder / f"{name}.py").write_text(sources.get(name, SERVICE))
    ports = claim_ports("127.0.0.1", [("test", "--port", 0)] * 5)
    return ClusterPlan(
        tree=folder,
        state_dir=folder / "state",
        base_folder=Path("/base"),
        dtype="float32",
        host="127.0.0.1",
        router_port=ports[0],
        http_port=ports[1],
        registry_port=ports[2],
        worker_ports=tuple(ports[3:]),
        drain_s=0.5,
    )


def test_workers_are_told_what_else_the_plan_says(tmp_path):
    plan = replace(make_plan(tmp_path), worker_options=("--max-resident-adapters", "1"))
    with_options = [spec.role for spec in plan.specs() if spec.command[-2:] == ("--max-resident-adapters", "1")]
    assert with_options == ["worker", "worker"]


def test_dedicated_workers_are_known_to_the_router_and_start_when_their_adapter_is_known(tmp_path):
    own = DedicatedWorker("dedicated-0", "sql", 4711, 4712)
    plan = replace(make_plan(tmp_path), dedicated=(own,))
    assert plan.names == ["registry", "worker-0", "worker-1", "router", "dedicated-0"]
    assert plan.admin["dedicated-0"] == "http://127.0.0.1:4712"
    router = plan.specs()[-1].command
    assert router[router.index("--workers") + 1].split(",") == list(plan.workers)
    assert plan.workers[-1] == "127.0.0.1:4711"
    spec = plan.dedicated_spec(own, "a" * 64)
    assert spec.command[-2:] == ("--dedicated", "a" * 64)
    assert (spec.name, spec.address, spec.role) == ("dedicated-0", "127.0.0.1:4711", "worker")


async def test_a_process_that_is_added_later_starts_and_ends_with_the_others(tmp_path):
    plan = make_plan(tmp_path)
    (port,) = claim_ports("127.0.0.1", [("test", "--port", 0)])
    own = DedicatedWorker("dedicated-0", "sql", port)
    states: list[tuple[str, str]] = []
    async with running(plan, lambda status: states.append((status.name, status.state))) as cluster:
        cluster.add(plan.dedicated_spec(own, "a" * 64))
        await cluster.wait_all_ready(100)
        assert ("dedicated-0", "ready") in states
    assert states.index(("dedicated-0", "stopped")) < states.index(("registry", "stopped"))


def test_the_plan_follows_the_services_command_lines(tmp_path):
    plan = make_plan(tmp_path)
    registry, first, second, router = plan.specs()
    assert registry.command == (
        "registry", "--host", "127.0.0.1", "--drain-timeout-s", "0.5", "--port", str(plan.registry_port),
        "--admin-port", "0", "--state-dir", f"{tmp_path}/state/registry", "--base-dirs", str(plan.base_folder),
    )  # fmt: skip
    assert first.command == (
        "worker", "--host", "127.0.0.1", "--drain-timeout-s", "0.5", "--port", str(plan.worker_ports[0]),
        "--admin-port", "0", "--worker-id", "worker-0",
        "--registry", plan.registry, "--base-dir", "/base", "--cache-dir", f"{tmp_path}/state/worker-0",
        "--dtype", "float32", "--drain-notice-s", "0",
    )  # fmt: skip
    assert second.name == "worker-1"
    assert router.command == (
        "router", "--host", "127.0.0.1", "--drain-timeout-s", "0.5", "--port", str(plan.router_port),
        "--http-port", str(plan.http_port),
        "--registry", plan.registry, "--workers", ",".join(plan.workers),
        "--drain-delay-s", "0",
    )  # fmt: skip


def test_a_wildcard_host_is_passed_on_but_reached_through_loopback(tmp_path):
    plan = ClusterPlan(tmp_path, tmp_path, tmp_path, "auto", "0.0.0.0", 1, 2, 3, (4,), insecure=True)
    assert (plan.router, plan.http, plan.workers) == ("127.0.0.1:1", "http://127.0.0.1:2", ("127.0.0.1:4",))
    assert all(spec.command[1:4] == ("--host", "0.0.0.0", "--insecure") for spec in plan.specs())


async def test_all_start_and_all_stop_in_order_and_nothing_is_left(tmp_path):
    told: list[Status] = []
    async with running(make_plan(tmp_path), told.append) as cluster:
        await cluster.wait_all_ready(100)
        pids = {status.pid for status in told if status.pid}
        assert len(pids) == 4
    assert not any(psutil.pid_exists(pid) for pid in pids)
    stopped = [status.name for status in told if status.state == "stopped"]
    assert stopped[0] == "router"
    assert set(stopped[1:3]) == {"worker-0", "worker-1"}
    assert stopped[3] == "registry"


async def test_killing_ends_a_stop_that_waits(tmp_path):
    deaf = SERVICE.replace("sigwait([signal.SIGTERM])", "sigwait([signal.SIGUSR1])")  # SIGTERM stays blocked
    plan = replace(make_plan(tmp_path, registry=deaf, worker=deaf, router=deaf), drain_s=600)
    async with asyncio.timeout(200), running(plan, lambda _: None) as cluster:
        await cluster.wait_all_ready(100)
        stopping = asyncio.create_task(cluster.stop())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(stopping), 0.3)
        cluster.kill()
        await stopping


async def test_one_that_cannot_start_ends_the_cluster_with_its_last_words(tmp_path):
    told: list[Status] = []
    plan = make_plan(tmp_path, worker="raise SystemExit('worker: --base-dir: no such folder')")
    with pytest.raises(FailedPrecondition, match=r"worker-\d could not start .*exit code 1(?s:.*)no such folder"):
        async with running(plan, told.append) as cluster:
            await cluster.wait_ready("worker-0", 100)
    assert not any(psutil.pid_exists(status.pid) for status in told if status.pid)


async def test_the_blocks_own_error_comes_out_as_it_is(tmp_path):
    with pytest.raises(DeadlineExceeded, match=r"router was not ready within .*router\.log"):
        async with running(
            make_plan(tmp_path, router="import signal; signal.sigwait([signal.SIGTERM])"), lambda _: None
        ) as c:
            await c.wait_ready("router", 0.2)


async def test_the_last_runs_logs_are_kept_beside_the_new_ones(tmp_path):
    plan = make_plan(tmp_path)
    plan.log_dir.mkdir(parents=True)
    (plan.log_dir / "router.log").write_text("before")
    async with running(plan, lambda _: None) as cluster:
        await cluster.wait_ready("router", 100)
    assert (plan.log_dir / "router.log").read_text() == ""
    assert (plan.log_dir / "router.log.1").read_text() == "before"


def test_a_state_folder_in_use_names_its_holder(tmp_path):
    with (tmp_path / "up.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write('{"pid": 4711, "host": "here"}')
        lock.flush()
        with pytest.raises(FailedPrecondition, match=r"process 4711.*--state"), state_lock(tmp_path).held():
            pass
    with state_lock(tmp_path).held():
        pass


def test_a_full_disk_is_told_with_the_folder(tmp_path):
    (tmp_path / "up.lock").symlink_to("/dev/full")
    with pytest.raises(FailedPrecondition, match=r"cannot be used.*--state"), state_lock(tmp_path).held():
        pass
