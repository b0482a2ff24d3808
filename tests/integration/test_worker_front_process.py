"""`python -m worker` as a process: what a person sees when it cannot run."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.tiny_base import write_tiny_base

FRONT_END_IMPORTS = (
    "import sys, worker.__main__; "
    "print([name for name in ('torch', 'transformers', 'peft', 'sqlalchemy') if name in sys.modules])"
)


def worker(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "worker", "--log-format", "json", *arguments]
    told = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False, env=told)


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    return done.stderr.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_tiny_base(tmp_path_factory.mktemp("process") / "base")


def test_the_front_end_imports_neither_torch_nor_oracles():
    done = subprocess.run([sys.executable, "-c", FRONT_END_IMPORTS], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_missing_options_are_named_with_status_2():
    done = worker(LORAPLEX_WORKER_PORT="none")
    assert done.returncode == 2
    for name in ("--base-dir", "--cache-dir", "--port"):
        assert name in done.stderr


def test_a_taken_port_is_said_in_one_line_with_status_1(base, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = worker("--base-dir", str(base), "--cache-dir", str(tmp_path), "--port", port)
    assert done.returncode == 1
    assert last_line(done).startswith(f"worker: cannot listen on 127.0.0.1:{port}: the port is taken")
    assert "Traceback" not in done.stderr


def test_a_folder_without_a_base_is_said_in_one_line_with_status_1(tmp_path):
    done = worker("--base-dir", str(tmp_path / "none"), "--cache-dir", str(tmp_path), "--port", "0")
    assert done.returncode == 1
    assert last_line(done) == f"worker: {tmp_path / 'none'} is not a folder"
    assert "Traceback" not in done.stderr


def test_a_signal_during_the_start_ends_worker_and_engine_with_status_0(base, tmp_path):
    command = [sys.executable, "-m", "worker", "--base-dir", str(base), "--cache-dir", str(tmp_path), "--port", "0"]
    with subprocess.Popen([*command, "--log-format", "json"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = next(line for line in process.stderr if '"engine.started"' in line)
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(60) == 0, rest
    assert time.monotonic() - started < 8
    assert "Traceback" not in rest
    with pytest.raises(ProcessLookupError):
        os.kill(json.loads(line)["pid"], 0)
