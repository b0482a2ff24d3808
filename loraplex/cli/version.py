"""`loraplex version`."""

from __future__ import annotations

import platform
from importlib import metadata

import grpc

from loraplex.cli import output
from loraplex.cli.options import Json


def version(as_json: Json = False) -> None:
    """Print the version."""
    facts = {"loraplex": metadata.version("loraplex"), "python": platform.python_version(), "grpc": grpc.__version__}
    if as_json:
        output.print_json(facts)
    else:
        output.stdout().print(f"loraplex {facts['loraplex']} (Python {facts['python']}, gRPC {facts['grpc']})")
