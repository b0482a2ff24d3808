"""The compose cluster, for real: built from a clean clone, asked the README's request, killed, scaled, taken down.

Run: python -m tools.compose_test. Ends with 0 and says why where no Docker engine can be had. --install has Debian's
packages of an engine installed where they are missing: for machines made for tests. The folder of --work is kept: an
engine started here then finds its images again.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NoReturn

from loraplex.records import Worker
from tools.compose_access import check_env, check_insecure, check_refusals
from tools.compose_cluster import PROJECT, Cluster, Failed, compose_command, until
from tools.docker_engine import NoEngine, running_engine
from tools.engine_images import BuildFailed, base_image, postgres_image
from tools.engine_packages import install, missing_packages
from tools.engine_probe import probe_containers, probe_packages

TREE: Final = Path(__file__).resolve().parent.parent
SERVICES: Final = ("registry", "worker", "router")
PIP_WORKS: Final = ("python3", "-m", "pip", "download", "--quiet", "--no-deps", "--dest", "/tmp", "typer")  # noqa: S108
"""What every build depends on, tried with one small package."""
REBUILD_S: Final = 60.0
"""A change of code, all three images; the dependencies alone take minutes."""
START_S: Final = 300.0
RETURN_S: Final = 120.0
"""A killed worker: restart, read and load the base model, be seen."""
SEEN_S: Final = 10.0
"""From a new worker container's start until the router has its status."""
STOP_S: Final = 30.0
"""An idle cluster: the router's notice takes five seconds, the worker's one, and they stop one after the other."""


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def local_wheels(constraints: Path) -> Iterator[Path]:
    """Yield wheels in the folders that pip is configured to look into whose versions are the pinned ones."""
    pins = set(re.findall(r"(?m)^([\w.-]+==[\w.]+)", constraints.read_text()))
    names = {pin.replace("-", "_").lower() for pin in pins}
    configured = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.find-links"], capture_output=True, text=True, check=False
    )
    for folder in f"{configured.stdout} {os.environ.get('PIP_FIND_LINKS', '')}".split():
        for wheel in Path(folder).glob("*.whl") if "://" not in folder else ():
            name, version = wheel.name.split("-")[:2]
            if f"{name}=={version.partition('+')[0]}".lower() in names:
                yield wheel


def check_images(cluster: Cluster) -> None:
    """Fail unless the images are as lean as they are said to be."""
    facts = (
        "import importlib.util as u, os, shutil; "
        "print(u.find_spec('torch') is not None, any(map(shutil.which, ('cc', 'gcc', 'ld'))), os.getuid())"
    )
    for service in SERVICES:
        has_torch, has_compiler, user = cluster.python(service, facts).split()
        if (has_torch, has_compiler, user) != (str(service == "worker"), "False", "10001"):
            raise Failed(f"{service}'s image: torch {has_torch}, compiler {has_compiler}, user {user}")
        size = int(cluster.inspect(f"loraplex/{service}:test", "{{.Size}}"))
        say(f"  {service}: {size / 1e6:.0f} MB, user {user}, {'with' if has_torch == 'True' else 'no'} torch")


def check_rebuild(cluster: Cluster) -> None:
    """Fail unless a change of code in every service is built again in seconds."""
    for service in SERVICES:
        with (cluster.clone / service / "__main__.py").open("a") as code:
            code.write("# changed\n")
    started_s = time.monotonic()
    cluster.compose("build")
    took_s = time.monotonic() - started_s
    if took_s > REBUILD_S:
        raise Failed(f"rebuilding after a change of code took {took_s:.0f} s")
    say(f"rebuilt all images after a change of code in {took_s:.1f} s")


def check_serving(cluster: Cluster) -> None:
    """Fail unless the README's request is answered with what its adapter is for."""
    (router,) = cluster.containers("router")
    health = "{{.State.Health.Status}}"
    until("the router is healthy", START_S, lambda: cluster.inspect(router, health) == "healthy" or None)
    text = cluster.ask()
    if "SELECT" not in text:
        raise Failed(f"text-to-sql answered {text!r}")
    say(f"the README's request was answered: {text.strip()!r}")


def check_setup(cluster: Cluster) -> None:
    """Fail unless the one-shot setup ends well."""
    (container,) = cluster.containers("setup")
    until("setup ends", START_S, lambda: cluster.inspect(container, "{{.State.Status}}") == "exited" or None)
    if cluster.inspect(container, "{{.State.ExitCode}}") != "0":
        raise Failed(f"setup failed:\n{cluster.run('docker', 'logs', container).stdout}")


def check_killed_worker(cluster: Cluster) -> None:
    """Fail unless a worker container whose process is killed comes back by itself and serves."""
    (container,) = cluster.containers("worker")
    (before,) = cluster.workers()
    pid = cluster.inspect(container, "{{.State.Pid}}")
    started_s = time.monotonic()
    # From outside its namespace: `docker kill` would count as an operator's wish and not be followed by a restart.
    kill = ("--pid", "host", "--user", "0", "--entrypoint", "python", "loraplex/registry:test", "-c")
    cluster.run("docker", "run", "--rm", *kill, f"import os; os.kill({pid}, 9)")

    def is_back() -> Worker | None:
        return next((w for w in cluster.workers() if w.epoch != before.epoch and w.state == "serving"), None)

    until("the killed worker serves again", RETURN_S, is_back)
    if cluster.inspect(container, "{{.RestartCount}}") != "1":
        raise Failed("the worker's container was not restarted by the engine")
    say(f"a killed worker served again after {time.monotonic() - started_s:.1f} s")
    check_serving(cluster)


def check_scaling(cluster: Cluster) -> None:
    """Fail unless the router sees a second worker within seconds of its container's start, and both serve."""
    (first,) = cluster.containers("worker")
    scaling = cluster.start_compose("up", "--detach", "--no-build", "--no-recreate", "--scale", "worker=2")
    labels = ("com.docker.compose.service=worker", f"com.docker.compose.project={PROJECT}")
    running = (
        "docker",
        "ps",
        "-q",
        "--no-trunc",
        *(word for label in labels for word in ("--filter", f"label={label}")),
    )

    def second() -> str | None:
        return next((c for c in cluster.run(*running).stdout.split() if c != first), None)

    until("a second worker's container runs", START_S, second)
    started_s = time.monotonic()
    until("the router sees the second worker", SEEN_S, lambda: len(cluster.workers()) == 2 or None)
    say(f"--scale worker=2 was seen by the router after {time.monotonic() - started_s:.1f} s")
    until(
        "both workers serve", RETURN_S, lambda: [w.state for w in cluster.workers()] == ["serving", "serving"] or None
    )
    if scaling.wait(RETURN_S) != 0:
        raise Failed(f"up --scale worker=2 ended with exit status {scaling.returncode}")
    check_serving(cluster)


def check_stop(cluster: Cluster, *services: str) -> None:
    """Fail unless every container of an idle cluster ends by itself, well, and long before it would be killed."""
    started_s = time.monotonic()
    cluster.compose("stop")
    took_s = time.monotonic() - started_s
    ends = {
        f"{service} {container[:12]}": cluster.inspect(container, "{{.State.ExitCode}}")
        for service in services
        for container in cluster.containers(service)
    }
    if len(ends) < len(services) or set(ends.values()) != {"0"}:
        raise Failed(f"exit statuses after compose stop: {ends}")
    if took_s > STOP_S:
        raise Failed(f"compose stop took {took_s:.0f} s")
    say(f"{len(ends)} containers stopped in {took_s:.1f} s, every exit status 0")


def check_postgres(cluster: Cluster, image: str) -> None:
    """Fail unless the profile keeps what is registered in PostgreSQL: also over new containers of the whole cluster."""
    cluster.environment["LORAPLEX_POSTGRES_IMAGE"] = image
    cluster.run("sh", "-c", "cat docker/postgres.env >> .env")
    cluster.compose("up", "--detach", "--no-build")
    check_setup(cluster)
    check_serving(cluster)
    check_stop(cluster, *SERVICES, "postgres")
    cluster.compose("down")
    cluster.compose("up", "--detach", "--no-build", "registry", "router", "worker", "postgres")
    count = (
        "psql",
        "--username",
        "loraplex",
        "--tuples-only",
        "--no-align",
        "--command",
        "select count(*) from adapters",
    )
    rows = cluster.compose("exec", "-T", "postgres", *count).strip()
    check_serving(cluster)
    if rows == "0":
        raise Failed("PostgreSQL has no adapters although they are served")
    say(f"with PostgreSQL: {rows} adapters in its tables, served again by new containers")


@contextmanager
def taken_down(cluster: Cluster) -> Iterator[None]:
    """Take the cluster down whatever happens; after a failure its logs are shown first."""
    try:
        yield
    except BaseException:
        say(cluster.compose("ps", check=False))
        say(cluster.compose("logs", "--no-color", "--tail", "40", check=False))
        raise
    finally:
        started_s = time.monotonic()
        cluster.environment["COMPOSE_PROFILES"] = "postgres"
        cluster.compose("down", "--volumes", "--remove-orphans", check=False)
        del cluster.environment["COMPOSE_PROFILES"]
        say(f"taken down in {time.monotonic() - started_s:.1f} s")


def run(work: Path) -> None:
    """Do it all. Raises NoEngine or Failed."""
    with running_engine(work) as environment:
        compose_command(environment)
        probe_containers(environment)
        image = base_image(environment, work)
        probe_packages(environment, image, *PIP_WORKS)
        clone = work / "clone"
        shutil.rmtree(clone, ignore_errors=True)
        subprocess.run(["git", "clone", "--quiet", TREE, clone], check=True)
        for wheel in local_wheels(clone / "constraints.txt"):
            shutil.copy(wheel, clone / "docker" / "wheels")
        made = subprocess.run(
            [sys.executable, "-m", "examples.demo_base"], cwd=TREE, stdout=subprocess.PIPE, text=True, check=True
        )
        cluster = Cluster(clone, environment, image, Path(made.stdout.strip().splitlines()[-1]))
        check_env(cluster)
        started_s = time.monotonic()
        say(f"building three images from a clean clone on {image}")
        cluster.compose("build")
        say(f"built in {time.monotonic() - started_s:.0f} s")
        check_images(cluster)
        check_rebuild(cluster)
        with taken_down(cluster):
            started_s = time.monotonic()
            cluster.compose("up", "--detach", "--no-build")
            check_setup(cluster)
            say(f"up, healthy and set up in {time.monotonic() - started_s:.0f} s")
            check_serving(cluster)
            check_refusals(cluster)
            check_killed_worker(cluster)
            check_scaling(cluster)
            check_stop(cluster, *SERVICES)
            check_insecure(cluster)
        try:
            postgres = postgres_image(environment, image, clone / "tools" / "postgres_stand_in")
        except NoEngine as error:
            say(f"the profile with PostgreSQL was NOT tested: {error}")
            return
        with taken_down(cluster):
            check_postgres(cluster, postgres)


class OutOfTime(Exception):
    """The time that was given is over."""


def stop_here(limit_s: int) -> NoReturn:
    """Raise OutOfTime."""
    raise OutOfTime(f"{limit_s} s are over")


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--work", type=Path, help="folder for the clone and an engine's data, kept afterwards")
    parser.add_argument("--install", action="store_true", help="install what an engine needs, where it is missing")
    limit = "stop unfinished after so many seconds, which is told but is no failure"
    parser.add_argument("--limit-s", type=int, default=0, help=limit)
    arguments = parser.parse_args()
    work: Path | None = arguments.work
    signal.signal(signal.SIGALRM, lambda *_: stop_here(arguments.limit_s))
    signal.alarm(arguments.limit_s)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))  # so that whatever was started is ended
    if work is not None:
        work.mkdir(parents=True, exist_ok=True)
    try:
        if arguments.install:
            install(missing_packages())
        if work is not None:
            run(work.resolve())
        else:
            with tempfile.TemporaryDirectory(prefix="loraplex-compose-", ignore_cleanup_errors=True) as folder:
                run(Path(folder))
    except NoEngine as error:
        say(f"compose-test: SKIPPED, nothing was tested: {error}")
    except OutOfTime as error:
        say(f"compose-test: STOPPED UNFINISHED: {error}; nothing had failed")
    except (BuildFailed, Failed) as error:
        print(f"compose-test: FAILED: {error}", file=sys.stderr)
        return 1
    else:
        say("compose-test: passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
