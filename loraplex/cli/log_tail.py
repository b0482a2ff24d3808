"""The end of a service's log, as a person reads it. Services write one JSON object a line where stderr is a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

_TAIL_BYTES: Final = 64 * 1024
_DULL: Final = ("event", "level", "timestamp", "service", "exception")


def tail(file: Path, num_lines: int = 8) -> list[str]:
    """Return the last readable lines of a log; empty where there is none."""
    return [readable(line) for line in _last_lines(file) if line.strip()][-num_lines:]


def last_progress(file: Path, begin: int) -> str:
    """Return the last `progress` in a log from byte `begin`: what a service tells those who wait for it, or nothing."""
    for line in reversed(_last_lines(file, begin)):
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("progress"), str):
            return str(entry["progress"])
    return ""


def _last_lines(file: Path, begin: int = 0) -> list[str]:
    try:
        with file.open("rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, min(begin, stream.tell()), stream.tell() - _TAIL_BYTES))
            return stream.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []


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
