"""Whose engine is used and ended: with commands that stand in for docker, dockerd and apt-get."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools import compose_test
from tools.compose_cluster import Failed
from tools.docker_engine import NoEngine, running_engine
from tools.engine_images import BuildFailed
from tools.engine_packages import install, missing_packages, services_stay_down
from tools.engine_probe import probe_containers, shell_archive

SHELL = shutil.which("sh") or "/bin/sh"
NEEDED = {name: shutil.which(name) or "" for name in ("cat", "ldd", "rm", "setpriv", "sh", "sleep")}
ENGINE = """
trap 'rm {folder}/engine; kill $!; exit 0' TERM
sleep 60 &
echo $$ > {folder}/engine
wait
"""
"""Runs until SIGTERM; the file `engine` is there for as long."""


class Commands:
    """A folder of commands that is the whole PATH, but for what shells need."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, path in NEEDED.items():
            (folder / name).symlink_to(path)

    def make(self, name: str, script: str) -> None:
        command = self.folder / name
        command.write_text(f"#!{SHELL}\n{script.replace('{folder}', str(self.folder))}")
        command.chmod(0o755)

    def said(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def commands(tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr("tools.docker_engine._DISK_BYTES", 0)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return Commands(folder)


def gone(pid, timeout_s=60.0):
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return True
        time.sleep(0.02)
    return False


def test_an_engine_that_answers_is_used_and_none_is_started(commands, tmp_path):
    commands.make("docker", "echo 28")
    commands.make("dockerd", "echo started > {folder}/engine")
    with running_engine(tmp_path) as environment:
        assert "DOCKER_HOST" not in environment or environment["DOCKER_HOST"] == os.environ["DOCKER_HOST"]
    assert not commands.said("engine")


@pytest.mark.parametrize("error", [None, Failed("a check failed"), KeyboardInterrupt()])
def test_an_engine_started_here_is_ended_whatever_happens(commands, tmp_path, error):
    commands.make("docker", "[ -s {folder}/engine ]")
    commands.make("dockerd", ENGINE)
    try:
        with running_engine(tmp_path) as environment:
            (pid,) = commands.said("engine")
            assert environment["DOCKER_HOST"] == f"unix://{tmp_path}/docker.sock"
            if error is not None:
                raise error
    except type(error):
        pass
    assert gone(int(pid))
    assert not commands.said("engine")  # it was asked to end, not killed


def test_an_engine_started_here_ends_even_where_this_process_is_killed(commands, tmp_path):
    commands.make("docker", "[ -s {folder}/engine ]")
    commands.make("dockerd", ENGINE)
    code = (
        "import pathlib, sys, time, os, tools.docker_engine as e; e._DISK_BYTES = 0; os.geteuid = lambda: 0\n"
        f"with e.running_engine(pathlib.Path({str(tmp_path)!r})): print('up', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("started")
        (pid,) = commands.said("engine")
        process.send_signal(signal.SIGKILL)
    assert gone(int(pid))


@pytest.mark.parametrize(("docker", "dockerd", "why"), [
    (None, None, "no docker command is installed"),
    ("echo no socket >&2; exit 1", None, r"\(no socket\) and none can be started without dockerd"),
    ("exit 1", "echo no cgroups; exit 1", "dockerd does not start here: no cgroups"),
])  # fmt: skip
def test_where_no_engine_can_be_had_the_reason_is_told(commands, tmp_path, docker, dockerd, why):
    for name, script in (("docker", docker), ("dockerd", dockerd)):
        if script is not None:
            commands.make(name, script)
    with pytest.raises(NoEngine, match=why), running_engine(tmp_path):
        pass


def test_only_root_starts_an_engine(commands, tmp_path, monkeypatch):
    commands.make("docker", "exit 1")
    commands.make("dockerd", ENGINE)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NoEngine, match="only root"), running_engine(tmp_path):
        pass


def test_an_engine_without_disk_for_the_images_is_not_started(commands, tmp_path, monkeypatch):
    commands.make("docker", "exit 1")
    commands.make("dockerd", ENGINE)
    monkeypatch.setattr("tools.docker_engine._DISK_BYTES", 10**18)
    with pytest.raises(NoEngine, match="GB free"), running_engine(tmp_path):
        pass


def test_the_probes_image_has_a_shell_that_runs_by_itself(tmp_path):
    archive = tmp_path / "shell.tar"
    archive.write_bytes(shell_archive())
    root = tmp_path / "root"
    root.mkdir()
    subprocess.run(["tar", "-xf", archive, "-C", root], check=True)
    if os.geteuid() != 0:
        pytest.skip("only root can change the root folder")
    chroot = shutil.which("chroot", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")  # not everybody's PATH has those
    assert chroot is not None
    said = subprocess.run([chroot, root, "/bin/sh", "-c", "echo alone"], capture_output=True, text=True, check=True)
    assert said.stdout == "alone\n"


def test_the_probe_runs_containers_as_services_and_builds_do_and_leaves_nothing(commands):
    commands.make("docker", 'echo "$@" >> {folder}/asked; [ "$1" = import ] && cat >/dev/null; echo a container works')
    probe_containers(os.environ)
    asked = commands.said("asked")
    assert any("--read-only" in line and "--publish 127.0.0.1::" in line for line in asked)
    assert any("--network host" in line for line in asked)
    assert [line.split()[:2] for line in asked[-2:]] == [["network", "rm"], ["image", "rm"]]


@pytest.mark.parametrize("step", ["import", "network", "run"])
def test_an_engine_that_runs_no_containers_counts_as_none(commands, step):
    commands.make("docker", f'cat >/dev/null; [ "$1" = {step} ] && {{ echo no overlay >&2; exit 1; }}; exit 0')
    with pytest.raises(NoEngine, match="no overlay"):
        probe_containers(os.environ)


def test_a_container_that_says_something_else_does_not_count_as_running(commands):
    commands.make("docker", "cat >/dev/null")
    with pytest.raises(NoEngine, match="runs no containers"):
        probe_containers(os.environ)


def test_only_packages_whose_commands_are_missing_are_installed(commands):
    assert missing_packages() == ["docker.io", "docker-compose", "debootstrap"]
    commands.make("docker", '[ "$1" = compose ]')  # a client with the plugin, and no engine
    commands.make("debootstrap", "")
    assert missing_packages() == ["docker.io"]
    commands.make("docker", "")  # an engine answers
    assert missing_packages() == []


def test_packages_are_installed_without_questions_and_without_starting_services(commands, tmp_path):
    policy = tmp_path / "policy-rc.d"
    commands.make("apt-get", f'echo "$DEBIAN_FRONTEND" "$@" "$(cat {policy})" >> {{folder}}/asked')
    install(["docker.io"], policy)
    asked = "\n".join(commands.said("asked"))
    assert "noninteractive -qq update" in asked
    assert "noninteractive -qq install --yes --no-install-recommends docker.io" in asked
    assert asked.count("exit 101") == 2
    assert not policy.exists()


def test_a_machines_own_policy_on_services_stays(tmp_path):
    policy = tmp_path / "policy-rc.d"
    policy.write_text("mine")
    with services_stay_down(policy):
        pass
    assert policy.read_text() == "mine"


def test_packages_that_cannot_be_installed_mean_no_engine(commands, tmp_path):
    with pytest.raises(NoEngine, match="only root on a Debian system"):
        install(["docker.io"], tmp_path / "policy")
    commands.make("apt-get", "echo E: no such package >&2; exit 100")
    with pytest.raises(NoEngine, match="not installed and cannot be: E: no such package"):
        install(["docker.io"], tmp_path / "policy")
    install([], tmp_path / "policy")


@pytest.mark.parametrize(("error", "status", "words"), [
    (NoEngine("no dockerd"), 0, "SKIPPED, nothing was tested: no dockerd"),
    (Failed("no answer"), 1, "FAILED: no answer"),
    (BuildFailed("no package"), 1, "FAILED: no package"),
])  # fmt: skip
def test_only_a_missing_engine_is_forgiven(monkeypatch, capsys, error, status, words):
    def run(work):
        raise error

    monkeypatch.setattr(compose_test, "run", run)
    monkeypatch.setattr(sys, "argv", ["compose_test"])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGHUP)}
    try:
        assert compose_test.main() == status
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    captured = capsys.readouterr()
    assert words in captured.out + captured.err
