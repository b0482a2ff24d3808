"""Wires the commands. Run as `loraplex` or `python -m loraplex.cli`."""

from __future__ import annotations

import io
import sys

from loraplex.cli import adapters, bases, keys, workers
from loraplex.cli.app import new_group
from loraplex.cli.chat import chat
from loraplex.cli.demo import demo
from loraplex.cli.generate import generate
from loraplex.cli.merge import merge
from loraplex.cli.models import models
from loraplex.cli.plan import plan
from loraplex.cli.up import up
from loraplex.cli.version import version

app = new_group("Loraplex: one base model, every tenant's LoRA adapter, any mix of adapters in one batch.", top=True)
app.command()(up)
app.command()(demo)
app.command()(plan)
app.command()(generate)
app.command()(chat)
app.add_typer(adapters.app, name="adapter")
adapters.app.command()(merge)
app.add_typer(bases.app, name="base")
app.add_typer(keys.app, name="key")
app.add_typer(workers.app, name="worker")
app.command()(models)
app.command()(version)


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 gets question marks, not a traceback
    app()


if __name__ == "__main__":
    main()
