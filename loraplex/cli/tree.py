"""Where the services are. They run from a source tree; the installed package alone has only client and command line."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from loraplex.errors import FailedPrecondition

_SERVICES: Final = ("registry", "router", "worker")


def find_tree() -> Path:
    """Return the source tree that holds the services: the one this package lies in, else the current folder.

    Raises FailedPrecondition where there is none.
    """
    for candidate in (Path(__file__).resolve().parents[2], Path.cwd()):
        if all((candidate / service / "__main__.py").is_file() for service in _SERVICES):
            return candidate
    raise FailedPrecondition(
        "the services are not here: the installed package holds only the client and the command line; "
        "run this from a checkout of the repository (`make setup`, then `loraplex up` inside it)"
    )
