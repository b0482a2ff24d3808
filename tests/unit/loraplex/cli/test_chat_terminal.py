"""`loraplex chat` on a real pseudo-terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest

from loraplex.registry.v1 import base_model_pb2

# The first terminal that the leader of a new session opens controls it, so Ctrl-C there becomes SIGINT here.
CONTROL = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "  # a shell's background jobs ignore it
    "os.open(os.ttyname(0), os.O_RDWR); os.execv(sys.argv[1], sys.argv[1:])"
)


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *arguments: str, env: dict[str, str]) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", CONTROL, sys.executable, "-m", "loraplex.cli", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", **env},
        )
        os.close(theirs)
        self.seen = self._rest = ""

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def until(self, text: str, timeout_s: float = 60.0) -> None:
        """Read until `text` comes; the next call begins behind it."""
        deadline, got = time.monotonic() + timeout_s, self._rest
        self._rest = ""
        while text not in got:
            left = deadline - time.monotonic()
            assert left > 0, got
            if select.select([self._ours], [], [], left)[0]:
                got += os.read(self._ours, 4096).decode("utf-8", "replace")
        self._rest = got.partition(text)[2]
        self.seen += got.removesuffix(self._rest)

    def ask(self, text: str) -> None:
        """Type a line and wait for the answer's first words; Enter, too, may come too early to be seen."""
        self.type(text)
        for _ in range(9):
            self.type("\r")
            with contextlib.suppress(AssertionError):
                return self.until("xxx", 2.0)
        self.type("\r")
        return self.until("xxx")

    def press_until_it_ends(self, key: str) -> None:
        """Press a key again and again, as people do: one that comes just as input() begins to wait is not seen."""
        for _ in range(20):
            self.type(key)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1)
                return

    def close(self) -> int:
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            self.process.wait()
            os.close(self._ours)


@pytest.fixture
def terminal(fake_cluster):
    fake_cluster.bases["endless"] = base_model_pb2.BaseModel(base_id="endless")
    return Terminal("chat", "endless", env={"LORAPLEX_ROUTER": fake_cluster.address})


def test_ctrl_c_ends_the_answer_but_not_the_conversation_and_ctrl_d_leaves(terminal, fake_cluster):
    terminal.until("you> ")
    assert "Ctrl-D leaves" in terminal.seen
    terminal.ask("first")
    terminal.type("\x03")
    terminal.until("(interrupted)")
    terminal.until("you> ")
    assert fake_cluster.cancelled.wait(30)
    terminal.ask("second")
    terminal.type("\x03")
    terminal.until("you> ")
    terminal.press_until_it_ends("\x04")
    assert terminal.close() == 0
    said = [message.role for message in fake_cluster.requests[1].chat.messages]
    assert said == ["user", "assistant", "user"]
    assert set(fake_cluster.requests[1].chat.messages[1].content) == {"x"}


def test_ctrl_c_at_the_prompt_leaves_with_130(terminal):
    terminal.until("you> ")
    terminal.press_until_it_ends("\x03")
    assert terminal.close() in (130, -signal.SIGINT)  # the latter where it was pressed again as Python was leaving
    assert "Traceback" not in terminal.seen
