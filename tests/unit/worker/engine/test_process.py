"""The engine as a process: options, Ready or StartFailed, exit statuses, signals; around the fake runner."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fake_runner import Trigger, expected_tokens
from tests.unit.worker.engine.client import Client
from worker.engine_process import parse_options, step_tokens
from worker.mailbox import Ready, Shutdown, StartFailed

Spawn = Callable[..., tuple[subprocess.Popen[bytes], Client]]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    processes: list[tuple[subprocess.Popen[bytes], Client]] = []

    def start(*options: str, **environment: str) -> tuple[subprocess.Popen[bytes], Client]:
        front, back = socket.socketpair()
        command = [sys.executable, "-m", "tests.fake_engine_process", "--fd", str(back.fileno()), *options]
        process = subprocess.Popen(
            command,
            pass_fds=[back.fileno()],
            env=os.environ | {f"FAKE_ENGINE_{k}": v for k, v in environment.items()},
            stderr=subprocess.DEVNULL,
        )
        back.close()
        processes.append((process, Client(front)))
        return processes[-1]

    yield start
    for process, client in processes:
        process.kill()
        process.wait(60)
        client.socket.close()


def test_an_engine_says_ready_serves_and_exits_0_on_shutdown(spawn: Spawn) -> None:
    process, client = spawn("--base-dir", "/any", "--max-context-tokens", "100", TOTAL_BLOCKS="5")
    ready = client.read()
    assert isinstance(ready, Ready)
    assert (ready.total_blocks, ready.block_tokens, ready.max_running_requests) == (5, 16, 64)
    assert ready.max_context_tokens == 80  # what the KV memory holds
    process.send_signal(signal.SIGINT)  # the front end's to decide
    client.submit(1)
    client.read_until_ended(1)
    assert client.tokens(1) == expected_tokens((5, 6, 7), 4)
    client.send(Shutdown())
    assert process.wait(60) == 0


def test_an_engine_exits_0_when_its_front_end_is_gone(spawn: Spawn) -> None:
    process, client = spawn("--base-dir", "/any", STEP_S="0.01")
    assert isinstance(client.read(), Ready)
    client.submit(1, max_tokens=200)
    client.socket.close()
    assert process.wait(60) == 0


def test_an_engine_that_cannot_start_says_why(spawn: Spawn) -> None:
    process, client = spawn("--base-dir", "/any", START_FAILURE="INVALID_BASE_MODEL")
    message = client.read()
    assert isinstance(message, StartFailed)
    assert message.reason == "INVALID_BASE_MODEL"
    assert process.wait(60) == 3


def test_a_bug_at_start_is_opaque(spawn: Spawn) -> None:
    process, client = spawn("--base-dir", "/any", START_FAILURE="NO_SUCH_REASON")
    message = client.read()
    assert isinstance(message, StartFailed)
    assert message.reason == "INTERNAL"
    assert "NO_SUCH" not in message.message
    assert process.wait(60) == 3


def test_the_process_ends_with_1_when_steps_fail_in_a_row_or_the_mailbox_is_broken(spawn: Spawn) -> None:
    process, client = spawn("--base-dir", "/any", TRIGGERS="1")
    assert isinstance(client.read(), Ready)
    for request_id in (1, 2, 3):
        client.submit(request_id, (Trigger.FAIL_STEP,))
        client.read_until_ended(request_id)
        assert client.failures[request_id].reason == "INTERNAL"
    assert process.wait(60) == 1
    process, client = spawn("--base-dir", "/any")
    assert isinstance(client.read(), Ready)
    client.socket.sendall(b"\xff\xff\xff\xff")
    assert process.wait(60) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends orphans on Linux only")
def test_an_engine_does_not_outlive_its_front_end_even_while_it_computes(tmp_path: Path) -> None:
    script = (
        "import socket, subprocess, sys, time\n"
        "from worker.mailbox import Sampling, Submit, encode\n"
        "front, back = socket.socketpair()\n"
        "process = subprocess.Popen([sys.executable, '-m', 'tests.fake_engine_process', '--fd', str(back.fileno()),"
        " '--base-dir', '/any'], pass_fds=[back.fileno(), front.fileno()])\n"  # the mailbox stays open without us
        "front.recv(4)\n"
        "front.sendall(encode(Submit(1, (3,), Sampling(), None, 'default', 0.0)))\n"
        "print(process.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"FAKE_ENGINE_TRIGGERS": "1", "PYTHONPATH": str(Path.cwd())},  # 3: the step hangs
    )
    assert parent.stdout is not None
    engine = os.pidfd_open(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    try:
        import select

        assert select.select([engine], [], [], 60)[0], "the engine still lives"
    finally:
        os.close(engine)


@pytest.mark.parametrize(
    "argv",
    [[], ["--fd", "3"], ["--fd", "3", "--base-dir", "/x", "--max-prefill-tokens", "0"], ["--fd", "3", "--base", "/x"]],
)
def test_bad_options_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse_options(argv)
    assert exit_.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(("rate", "tokens"), [(0.5, 64), (600.0, 120), (9_000.0, 1_800), (1e6, 2048)])
def test_a_step_holds_up_running_answers_for_a_fifth_of_a_second(rate: float, tokens: int) -> None:
    assert step_tokens(rate) == tokens
