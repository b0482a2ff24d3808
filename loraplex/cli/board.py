"""What `up` and `demo` show of their processes: a live table on a terminal while they start, else a line per change."""

from __future__ import annotations

import json
import time
from types import TracebackType
from typing import Any, Final, Self

from rich import box
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from loraplex.cli import output
from loraplex.cli.process import Status

_STYLES: Final = {
    "starting": "yellow",
    "ready": "green",
    "not ready": "yellow",
    "restarting": "bold yellow",
    "failed": "bold red",
    "stopping": "dim",
    "stopped": "dim",
}


class LineBoard:
    """A line per change, for pipes and logs; what the other boards have in common with it is its interface."""

    def __init__(self) -> None:
        self._console = output.stderr()
        self._start_s: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def update(self, status: Status) -> None:
        """Print a status line."""
        style, detail = _STYLES[status.state], self._detail(status)
        line = f"{escape(status.name):<10} [{style}]{status.state:<10}[/] {escape(output.clean(detail))}"
        self._console.print(line.rstrip())

    def say(self, text: str) -> None:
        """Print a remark."""
        self._console.print(escape(text))

    def settle(self) -> None:
        """All is up: from now on a line per change, as always here."""

    def event(self, name: str, facts: dict[str, Any]) -> None:
        """Tell programs a fact; people have `say`."""

    def _detail(self, status: Status) -> str:
        """Return what stands behind the state: how long the start took, once it is over."""
        if status.state == "starting" and not status.detail:
            self._start_s[status.name] = time.monotonic()
        elif status.state == "ready" and status.name in self._start_s:
            return f"after {time.monotonic() - self._start_s.pop(status.name):.1f} s"
        return status.detail


class LiveBoard(LineBoard):
    """A table that follows the start, then lines."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self._rows: dict[str, tuple[Any, str]] = {name: (Text(""), "") for name in names}
        self._live: Live | None = Live(
            console=self._console, get_renderable=self._table, refresh_per_second=6, transient=False
        )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.settle()

    def update(self, status: Status) -> None:
        """Change the process's row."""
        if self._live is None:
            super().update(status)
            return
        busy = status.state in ("starting", "restarting", "stopping")
        label = Text(status.state, style=_STYLES[status.state])
        self._rows[status.name] = (Spinner("dots", text=label) if busy else label, self._detail(status))

    def settle(self) -> None:
        """Leave the table as it is; what comes is printed below it."""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def _table(self) -> Table:
        table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
        table.add_column(no_wrap=True, style="bold")
        table.add_column(no_wrap=True, min_width=12)
        table.add_column(overflow="ellipsis", no_wrap=True)
        for name, (state, detail) in self._rows.items():
            table.add_row(name, state, Text(output.clean(detail), style="dim"))
        return table


class JsonBoard(LineBoard):
    """A JSON object a line on stdout, for programs."""

    def update(self, status: Status) -> None:
        """Print a process event."""
        self._print("process", output.jsonable(status))

    def say(self, text: str) -> None:
        """Print a note event."""
        self._print("note", {"text": text})

    def event(self, name: str, facts: dict[str, Any]) -> None:
        """Print an event."""
        self._print(name, output.jsonable(facts))

    def _print(self, name: str, facts: dict[str, Any]) -> None:
        print(json.dumps({"event": name, **facts}, ensure_ascii=False), flush=True)


def make_board(names: list[str], *, as_json: bool) -> LineBoard:
    """Return the board that fits where we print."""
    if as_json:
        return JsonBoard()
    return LiveBoard(names) if output.stderr().is_terminal else LineBoard()
