from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from loraplex.cli import output
from loraplex.errors import InvalidName, RegistryUnavailable
from loraplex.generation import TokenLogprob
from loraplex.records import BaseModel


def test_records_become_json_with_times_and_bytes(capsys):
    base = BaseModel("tiny", "d", "Llama", 7, datetime(2026, 1, 2, tzinfo=UTC))
    output.print_json({"base": base, "tokens": (TokenLogprob(1, b"\xc3", -0.5),)})
    assert json.loads(capsys.readouterr().out) == {
        "base": {
            "base_id": "tiny",
            "digest": "d",
            "architecture": "Llama",
            "num_parameters": 7,
            "create_time": "2026-01-02T00:00:00+00:00",
        },
        "tokens": [{"token_id": 1, "token": "\\xc3", "logprob": -0.5}],
    }


def test_a_piped_table_is_whole_and_bare(capsys):
    output.print_table(["name", "#rank"], [("x" * 300, "16"), ("[bold]y[/]", "4")], empty="none")
    out = capsys.readouterr().out
    assert "x" * 300 in out
    assert "[bold]y[/]" in out
    assert "\x1b" not in out
    assert "─" not in out


def test_an_empty_table_says_what_to_do_on_stderr(capsys):
    output.print_table(["name"], [], empty="nothing; add one")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "nothing; add one\n")


def test_errors_are_one_line_with_the_remedy(capsys):
    output.print_error(RegistryUnavailable("no registry", service="registry", address="x:1"), as_json=False)
    err = capsys.readouterr().err
    assert err.startswith("error: no registry; start a cluster with `loraplex up`")
    assert "--registry" in err
    assert err.count("\n") == 1


def test_errors_in_json_carry_reason_and_facts(capsys):
    output.print_error(InvalidName("bad [name]", field="name"), as_json=True)
    assert json.loads(capsys.readouterr().err) == {
        "error": {"reason": "INVALID_NAME", "message": "bad [name]", "metadata": {"field": "name"}}
    }


def test_model_text_cannot_steer_the_terminal():
    assert output.clean("a\x1b[2Jb\x9b31mc\td\ne\x7f") == "a�[2Jb�31mc\td\ne�"


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (999, "999 B"), (1_800_000, "1.8 MB"), (2.5e12, "2500.0 GB")]
)
def test_sizes(num_bytes, text):
    assert output.size(num_bytes) == text
