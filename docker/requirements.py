"""Print what a service needs, one requirement a line: the project's dependencies and those of its extras.

Run: python3 docker/requirements.py EXTRA... The images install these before the code comes in, so that a change of
code leaves the layers of dependencies alone. Standard library only.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path


def requirements(extras: list[str]) -> list[str]:
    """Return requirements of pyproject.toml's project and `extras`, each once; extras of itself are followed."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    own = re.compile(rf"{project['name']}\[([^\]]+)\]")
    found: dict[str, None] = dict.fromkeys(project["dependencies"])
    waiting = list(extras)
    while waiting:
        for requirement in project["optional-dependencies"][waiting.pop()]:
            if inner := own.fullmatch(requirement):
                waiting += [extra.strip() for extra in inner[1].split(",")]
            else:
                found[requirement] = None
    return list(found)


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
