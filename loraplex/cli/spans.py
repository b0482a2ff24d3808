"""A request's spans as a tree on stderr: what ran where, when it began, how long it took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.markup import escape
from rich.table import Table

from loraplex.cli import output
from loraplex.spans import Placed, Span, in_tree_order

_FACTS: Final = (
    ("loraplex.worker.id", "{}"),
    ("loraplex.adapter.tier", "adapter from {}"),
    ("gen_ai.usage.input_tokens", "{} tokens in"),
    ("gen_ai.usage.output_tokens", "{} out"),
)
"""What people see of a span's attributes, and in which words; all of them come with --json."""


def label(placed: Placed) -> str:
    """Return a span's name behind the lines that show its place."""
    if not placed.branches:
        return placed.span.name
    lines = "".join("│  " if more else "   " for more in placed.branches[:-1])
    return f"{lines}{'├─ ' if placed.branches[-1] else '└─ '}{placed.span.name}"


def remark(span: Span, parent: Span | None = None) -> str:
    """Return what is worth knowing of a span beside its times, less what its parent has told."""
    told = parent.attributes if parent is not None else {}
    facts = [
        words.format(value)
        for key, words in _FACTS
        if (value := span.attributes.get(key)) is not None and value != told.get(key)
    ]
    if span.status == "ok":
        return ", ".join(facts)
    return ", ".join([span.status if span.status == "cancelled" else f"error {span.status_reason}", *facts])


def tree_table(spans: Sequence[Span]) -> Table:
    """Return the tree; times count from the first span's start."""
    by_id = {span.span_id: span for span in spans}
    began = min(span.start_time for span in spans)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(f"trace {spans[0].trace_id}", no_wrap=True)
    table.add_column("where", no_wrap=True)
    table.add_column("start", justify="right", no_wrap=True)
    table.add_column("took", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for placed in in_tree_order(spans):
        span = placed.span
        offset_s = (span.start_time - began).total_seconds()
        told = remark(span, by_id.get(span.parent_span_id))
        cells = (label(placed), span.service, f"+{output.duration(offset_s)}", output.duration(span.duration_s), told)
        table.add_row(*(escape(output.clean(cell)) for cell in cells), style=None if span.status == "ok" else "red")
    return table


def print_spans(spans: Sequence[Span]) -> None:
    """Print the tree on stderr."""
    console = output.stderr()
    if not spans:
        output.note("the router sent no spans; one of an older version knows nothing of --trace")
        return
    if not console.is_terminal:
        console.width = 10_000  # nobody sees a width there
    console.print(tree_table(spans))
