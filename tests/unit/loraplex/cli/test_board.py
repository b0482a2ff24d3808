"""What people see of processes that start."""

from __future__ import annotations

import pytest

from loraplex.cli.board import LineBoard
from loraplex.cli.process import Status


def test_a_line_tells_what_takes_long_and_then_how_long_all_of_it_took(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = iter([100.0, 163.5])
    monkeypatch.setattr("loraplex.cli.board.time.monotonic", lambda: next(now_s))
    board = LineBoard()
    for state, detail in (("starting", ""), ("starting", "compiling kernels"), ("ready", "")):
        board.update(Status("worker-0", state, detail, 17))  # type: ignore[arg-type] # a state each
    lines = [" ".join(line.split()) for line in capsys.readouterr().err.splitlines()]
    assert lines == ["worker-0 starting", "worker-0 starting compiling kernels", "worker-0 ready after 63.5 s"]
