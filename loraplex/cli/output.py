"""How commands speak: tables for people or JSON for programs on stdout, everything else on stderr.

Colours and cursor tricks only on a terminal, and never with NO_COLOR (rich sees to both).
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loraplex.cli.refusals import message_of
from loraplex.errors import LoraplexError, RegistryUnavailable, Unavailable

SHORT_DIGEST: Final = 12
"""Hex characters of a digest that people see; `name@<these>` addresses a version."""

# Every C0 control but newline and tab, and C1: what a model writes must not steer the terminal.
_CONTROLS: Final = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], "�")


def stdout() -> Console:
    """Return the console of results."""
    return Console(file=sys.stdout, highlight=False, soft_wrap=True)


def stderr() -> Console:
    """Return the console of progress, notes and errors."""
    return Console(file=sys.stderr, highlight=False, soft_wrap=True)


def jsonable(value: Any) -> Any:
    """Return records, datetimes and bytes as what json can write."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): jsonable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(entry) for entry in value]
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return value


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """Print a result as JSON."""
    print(json.dumps(jsonable(value), indent=indent, ensure_ascii=False), flush=True)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, empty: str) -> None:
    """Print rows for people; `empty` says what to do where there are none. Columns named `#…` are right-aligned."""
    cells = [tuple(row) for row in rows]
    console = stdout()
    if not console.is_terminal:  # nobody sees a width there, so nothing is cut to one
        console = Console(file=sys.stdout, highlight=False, width=10_000)
    if not cells:
        stderr().print(escape(empty))
        return
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.removeprefix("#"), justify="right" if column.startswith("#") else "left", no_wrap=True)
    for row in cells:
        table.add_row(*(escape(cell) for cell in row))
    console.print(table)


def note(text: str) -> None:
    """Print a remark for people on stderr."""
    stderr().print(escape(text), style="dim")


def clean(text: str) -> str:
    """Return text without control characters, for printing to a terminal."""
    return text.translate(_CONTROLS)


def write_text(text: str) -> None:
    """Write model text to stdout at once; cleaned where stdout is a terminal, else as it is."""
    sys.stdout.write(clean(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def print_error(error: LoraplexError, *, as_json: bool) -> None:
    """Print an error on stderr: one line with reason and remedy, or a JSON object."""
    if as_json:
        body = {"reason": error.reason, "message": message_of(error, os.environ), "metadata": error.metadata}
        print(json.dumps({"error": body}, ensure_ascii=False), file=sys.stderr, flush=True)
        return
    line = stderr()
    line.print("error:", style="bold red", end=" ")
    line.print(escape(clean(message_of(error, os.environ))) + escape(_remedy(error)))


def _remedy(error: LoraplexError) -> str:
    service = error.metadata.get("service")
    if service and isinstance(error, Unavailable):
        variable = "LORAPLEX_REGISTRY" if isinstance(error, RegistryUnavailable) else "LORAPLEX_ROUTER"
        return f"; start a cluster with `loraplex up`, or name another address with --{service} or ${variable}"
    return ""


def size(num_bytes: float) -> str:
    """Return a size for people: 940 B, 1.8 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000 or unit == "GB":
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    raise AssertionError("unreachable")


def duration(seconds: float) -> str:
    """Return a duration for people: 3.2 ms, 1.25 s."""
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def short(digest: str) -> str:
    """Return the part of a digest that people need."""
    return digest[:SHORT_DIGEST]


def when(moment: datetime) -> str:
    """Return a time for people, in their zone."""
    return moment.astimezone().strftime("%Y-%m-%d %H:%M")
