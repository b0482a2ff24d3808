"""The end of a service's log, as a person reads it. Services write one JSON object a line where stderr is a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

_TAIL_BYTES: Final = 64 * 1024
_DULL: Final = ("event", "level", "timestamp", "service", "exception")


def tail(file: Path, num_lines: int = 8) -> list[str]:
    """Return the last readable lines of a log; empty where there is none."""
    try:
        with file.open("rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - _TAIL_BYTES))
            lines = stream.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    return [readable(line) for line in lines if line.strip()][-num_lines:]


def readable(line: str) -> str:
    """Return `event key=value …: exception` for a JSON log line, and any other line as it is."""
    try:
        entry = json.loads(line)
    except json.JSONDecodeError:
        return line.rstrip()
    if not isinstance(entry, dict) or "event" not in entry:
        return line.rstrip()
    facts = [f"{key}={value}" for key, value in entry.items() if key not in _DULL]
    text = " ".join([str(entry["event"]), *facts])
    return f"{text}: {cause}" if (cause := _cause(entry.get("exception"))) else text


def _cause(exception: Any) -> str:
    """Return type and message of the exception that structlog's dict_tracebacks wrote, or of a plain traceback."""
    if isinstance(exception, list) and exception and isinstance(exception[0], dict):
        return f"{exception[0].get('exc_type', 'error')}: {exception[0].get('exc_value', '')}"
    if isinstance(exception, str) and exception.strip():
        return exception.strip().splitlines()[-1]
    return ""
