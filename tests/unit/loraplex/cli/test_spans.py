"""The span tree that `--trace` prints."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from loraplex.cli.spans import print_spans, remark
from loraplex.spans import Span

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
ROOT = Span("ab" * 16, "1", "", "router", "Generate", BEGAN, 1.25, attributes={"loraplex.adapter.tier": "disk"})


def part(span_id: str, parent: str, name: str, at_ms: float, took_s: float, **fields: Any) -> Span:
    return replace(
        ROOT,
        span_id=span_id,
        parent_span_id=parent,
        service="worker",
        name=name,
        start_time=BEGAN + timedelta(milliseconds=at_ms),
        duration_s=took_s,
        **{"attributes": {}, **fields},
    )


def test_the_tree_shows_places_times_and_what_went_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    print_spans(
        [
            part("3", "2", "tokenize", 3.25, 0.0004, attributes={"gen_ai.usage.input_tokens": "7"}),
            part("2", "1", "call", 2, 0.5, status="error", status_reason="DRAINING"),
            part("4", "1", "call", 600, 0.6, status="cancelled", status_reason="CANCELLED"),
            ROOT,
        ]
    )
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split() for line in err.splitlines()] == [
        ["trace", "ab" * 16, "where", "start", "took"],
        ["Generate", "router", "+0.0", "ms", "1.25", "s", "adapter", "from", "disk"],
        ["├─", "call", "worker", "+2.0", "ms", "500.0", "ms", "error", "DRAINING"],
        ["│", "└─", "tokenize", "worker", "+3.2", "ms", "0.4", "ms", "7", "tokens", "in"],
        ["└─", "call", "worker", "+600.0", "ms", "600.0", "ms", "cancelled"],
    ]


def test_control_characters_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_spans([replace(ROOT, name="evil\x1b[2J[red]", attributes={"loraplex.worker.id": "\x07w"})])
    err = capsys.readouterr().err
    assert "\x1b" not in err
    assert "\x07" not in err
    assert "[red]" in err


def test_a_router_that_sends_no_spans_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    print_spans([])
    assert "sent no spans" in capsys.readouterr().err


def test_what_the_parent_has_told_is_not_told_again() -> None:
    child = replace(ROOT, attributes={"loraplex.adapter.tier": "disk", "loraplex.worker.id": "w0"})
    assert remark(child, ROOT) == "w0"
    assert remark(child) == "w0, adapter from disk"
