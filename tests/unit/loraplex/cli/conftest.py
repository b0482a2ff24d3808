"""Runs commands in this process against the fake cluster behind a real gRPC server."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from loraplex.cli.__main__ import main


@dataclass
class Ran:
    code: int
    out: str
    err: str

    def json(self):
        return json.loads(self.out)


@pytest.fixture
def run(fake_cluster, monkeypatch, capsys) -> Callable[..., Ran]:
    """Run `loraplex ARGUMENT...` against the fake cluster, with `stdin` piped in."""
    monkeypatch.setenv("LORAPLEX_ROUTER", fake_cluster.address)
    monkeypatch.setenv("LORAPLEX_REGISTRY", fake_cluster.address)
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def run(*arguments: object, stdin: str = "") -> Ran:
        monkeypatch.setattr(sys, "argv", ["loraplex", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        return Ran(int(exit_.value.code or 0), captured.out, captured.err)

    return run
