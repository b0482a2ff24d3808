"""Give `.env`, which docker compose reads, fresh secrets for a cluster; what is there already stays as it is.

Run: python3 docker/compose_env.py [FILE]. The file is then for its owner only (mode 0600), and no secret is printed.
Standard library only, because it runs before anything is installed.
"""

from __future__ import annotations

import re
import secrets
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

_SECRETS: Final[dict[str, tuple[str, Callable[[], str]]]] = {
    "LORAPLEX_CLUSTER_TOKEN": ("what services and operators show each other", lambda: secrets.token_hex(32)),
    "LORAPLEX_API_KEY": (
        "what clients show the router: its first API key",
        lambda: f"lpx_bootstrap_{secrets.token_hex(32)}",
    ),
    "LORAPLEX_POSTGRES_PASSWORD": ("with docker/postgres.env only", lambda: secrets.token_hex(24)),
}


def missing(text: str) -> list[str]:
    """Return the secrets that an env file does not set; one that is set to nothing was emptied on purpose."""
    return [name for name in _SECRETS if not re.search(rf"(?m)^\s*(export\s+)?{name}\s*=", text)]


def lines(names: list[str]) -> str:
    """Return lines of an env file with fresh values of these secrets."""
    return "".join(f"# {_SECRETS[name][0]}\n{name}={_SECRETS[name][1]()}\n" for name in names)


def replace(path: Path, text: str) -> None:
    """Put `text` into a file that nobody else could read at any time. Raises OSError."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f"{path.name}.", delete=False) as file:  # mode 0600
        try:
            file.write(text)
            file.flush()
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink()
            raise


def main() -> int:
    """Return the exit status."""
    path = Path(sys.argv[1] if len(sys.argv) > 1 else ".env").resolve()  # a link stays one
    try:
        text = path.read_text() if path.exists() else ""
        names = missing(text)
        end = "" if not text or text.endswith("\n") else "\n"
        replace(path, f"{text}{end}{lines(names)}")
    except (OSError, UnicodeDecodeError) as error:
        print(f"{path} cannot be read or written: {getattr(error, 'strerror', None) or 'it is not text'}")
        return 1
    if names:
        print(f"{path} has a fresh {', '.join(names)}; only you can read it")
    else:
        print(f"{path} had every secret already; nothing was changed but that only you can read it")
    print('for clients in this shell: set -a; . ./.env; set +a; then send "Authorization: Bearer $LORAPLEX_API_KEY"')
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
