"""What is shown of an evaluation that runs."""

from __future__ import annotations

import pytest

from loraplex.cli.evaluations import progress


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)


@pytest.mark.parametrize(("total", "lines"), [(92, 10), (10, 10), (3, 3), (1, 1), (0, 0)])
def test_a_pipe_gets_a_first_line_and_at_most_ten_of_progress(capsys, total, lines):
    with progress("sql", quiet=False) as tell:
        assert capsys.readouterr().err.startswith("evaluating sql on a worker: ")
        for done in range(total + 1):
            tell(done, total)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == lines
    assert all(line.endswith(f" of {total} prompts are compared") for line in told)


def test_programs_are_told_nothing_but_the_result(capsys):
    with progress("sql", quiet=True) as tell:
        tell(1, 2)
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar_whatever_the_result_is_printed_as(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # counts as a terminal
    with progress("sql", quiet=True) as tell:
        tell(1, 2)
    assert "1/2\x1b[0m prompts" in capsys.readouterr().err
