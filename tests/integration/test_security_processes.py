"""Services as processes: what is bound and refused, and that no secret shows in logs, command lines or output."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from common.api_keys import make_key
from tests.running_registry import ROOT, registry_process

TOKEN = "the-cluster-token-of-this-test"
WRONG_TOKEN = "another-token-of-another-cluster"
KEY, WRONG_KEY = make_key(), make_key()
SECRETS = (TOKEN, WRONG_TOKEN, KEY.text.split("_")[2], WRONG_KEY.text.split("_")[2])


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("LORAPLEX_"):
            monkeypatch.delenv(name)


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True, text=True, timeout=180, check=False, cwd=ROOT, env={**os.environ, **environment},
    )  # fmt: skip


@pytest.mark.parametrize(
    "command",
    [
        ("registry", "--state-dir", "unused"),
        ("router",),
        ("worker", "--base-dir", "unused", "--cache-dir", "unused"),
    ],
)
def test_a_service_does_not_start_on_an_open_address_without_a_token(command):
    done = run(*command, "--host", "0.0.0.0", "--port", "0")
    assert done.returncode == 2
    assert done.stderr.startswith(f"{command[0]}: host 0.0.0.0 is reachable by others; set LORAPLEX_CLUSTER_TOKEN")
    assert len(done.stderr.splitlines()) == 1
    done = run(*command, "--cluster-token", TOKEN)
    assert done.returncode == 2
    assert "--cluster-token: everybody on this machine can read a command line" in done.stderr
    assert TOKEN not in done.stderr


@contextmanager
def router(log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "router", "--port=0", "--http-port=0", "--drain-delay-s=0", *arguments]
    with log.open("wb") as stderr:
        process = subprocess.Popen([*command, "--log-format=json", "--log-level=debug"], cwd=ROOT, stderr=stderr)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)


def lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]


async def said(log: Path, event: str) -> dict[str, Any]:
    """Wait for a line of the log; nothing tells of one in a file."""
    async with asyncio.timeout(60):
        while True:
            for line in lines(log):
                if line["event"] == event:
                    return line
            await asyncio.sleep(0.05)


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


async def test_insecure_is_warned_of_in_the_log(tmp_path):
    with router(tmp_path / "log", "--host=0.0.0.0", "--insecure"):
        warning = await said(tmp_path / "log", "security.insecure")
    assert (warning["level"], warning["host"]) == ("warning", "0.0.0.0")


async def test_no_secret_shows_anywhere(tmp_path, monkeypatch):
    monkeypatch.setenv("LORAPLEX_CLUSTER_TOKEN", TOKEN)
    monkeypatch.setenv("LORAPLEX_REGISTRY_BOOTSTRAP_KEY", KEY.text)
    shown: list[str] = []
    made: list[str] = []

    async def cli(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        done = await asyncio.to_thread(run, "loraplex.cli", *arguments, **environment)
        shown.append(done.stderr)
        return done

    async with registry_process(tmp_path / "state", "--log-level", "debug", "--host", "0.0.0.0") as registry:
        address = f"127.0.0.1:{await registry.listening_port()}"
        log = tmp_path / "router.log"
        with router(log, f"--registry={address}", "--host=0.0.0.0") as process:
            port = (await said(log, "router.listening"))["http_port"]
            await said(log, "router.ready")
            shown += [command_line(pid) for pid in (process.pid, registry.process.pid)]
            async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}/v1", timeout=30) as client:
                for secret, status in ((KEY.text, 200), (WRONG_KEY.text, 401), (WRONG_TOKEN, 401), (TOKEN, 200)):
                    answer = await client.get("/models", headers={"authorization": f"Bearer {secret}"})
                    assert answer.status_code == status
                    shown.append(f"{answer.headers} {answer.text}")
                    answer = await client.post(
                        "/completions",
                        headers={"authorization": f"Bearer {secret}"},
                        json={"model": "none", "prompt": "x"},
                    )
                    assert answer.status_code == (404 if secret == KEY.text else 401)
                    shown.append(f"{answer.headers} {answer.text}")
            where = ("--registry", address)
            assert (await cli("key", "list", *where, LORAPLEX_CLUSTER_TOKEN=WRONG_TOKEN)).returncode == 1
            assert (await cli("key", "add", "bootstrap", *where)).returncode == 1
            done = await cli("key", "add", "acme", *where)
            assert done.returncode == 0
            made.append(done.stdout.strip())
            listed = await cli("key", "list", "--json", *where)
            shown.append(listed.stdout)
            assert {key["name"] for key in json.loads(listed.stdout)["api_keys"]} == {"acme", "bootstrap"}
            done = await cli("key", "rm", "acme", *where)
            shown.append(done.stdout)
            assert done.returncode == 0
        registry.process.terminate()
        await registry.end()
        shown += [log.read_text(), *registry.log]
    text = "\n".join(shown)
    assert "registry.api_key_added" in text
    assert "registry.bootstrap_key_set" in text
    for secret in (*SECRETS, made[0].split("_")[2]):
        assert secret not in text
