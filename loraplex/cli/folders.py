"""Where the command line keeps things of this user, by the XDG base directory specification."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return the folder for what can be computed again: $XDG_CACHE_HOME/loraplex or ~/.cache/loraplex."""
    return _folder("XDG_CACHE_HOME", ".cache")


def default_state_dir() -> Path:
    """Return the folder of a local cluster's state: $XDG_STATE_HOME/loraplex or ~/.local/state/loraplex."""
    return _folder("XDG_STATE_HOME", ".local/state")


def _folder(variable: str, default: str) -> Path:
    configured = os.environ.get(variable, "")
    return (Path(configured) if configured else Path.home() / default) / "loraplex"
