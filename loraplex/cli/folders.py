"""Folders: those that a user names, and where the command line keeps its own (XDG base directory specification)."""

from __future__ import annotations

import os
from pathlib import Path

from loraplex.errors import InvalidParameter


def named(path: str | Path) -> Path:
    """Return a path that a user gave, `~` replaced and absolute. Raises InvalidParameter where `~user` is nobody."""
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:
        raise InvalidParameter(f"{path}: there is no such user here, or none with a home", field="path") from error


def real(folder: Path) -> Path:
    """Return a folder with its links followed. Raises InvalidParameter where they lead in a circle."""
    try:
        return folder.resolve()
    except RuntimeError as error:
        raise InvalidParameter(f"{folder}: its links lead in a circle", field="path") from error


def cache_dir() -> Path:
    """Return the folder for what can be computed again: $XDG_CACHE_HOME/loraplex or ~/.cache/loraplex."""
    return _folder("XDG_CACHE_HOME", ".cache")


def default_state_dir() -> Path:
    """Return the folder of a local cluster's state: $XDG_STATE_HOME/loraplex or ~/.local/state/loraplex."""
    return _folder("XDG_STATE_HOME", ".local/state")


def _folder(variable: str, default: str) -> Path:
    configured = os.environ.get(variable, "")
    return (Path(configured) if configured else Path.home() / default) / "loraplex"
