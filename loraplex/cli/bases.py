"""`loraplex base`: add, list."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from loraplex.cli import output
from loraplex.cli.app import new_group
from loraplex.cli.base_source import default_base_id
from loraplex.cli.folders import cache_dir, named, real
from loraplex.cli.options import REGISTRY, Json, Registry
from loraplex.client import Client
from loraplex.manifest import BaseManifest, read_manifest

app = new_group("Register base models and look at them.")


def manifest_with_progress(folder: Path, *, quiet: bool) -> BaseManifest:
    """Read a base model's manifest, with a progress bar on a terminal; it is remembered until a file changes."""
    console = output.stderr()
    bar = Progress(
        TextColumn("hashing"), BarColumn(), DownloadColumn(),
        console=console, transient=True, disable=quiet or not console.is_terminal,
    )  # fmt: skip
    with bar:
        total = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        task = bar.add_task("hash", total=total)
        return read_manifest(folder, cache_dir=cache_dir(), progress=lambda num_bytes: bar.advance(task, num_bytes))


@app.command()
def add(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A Hugging Face folder.", show_default=False)],
    base_id: Annotated[
        str, typer.Option("--id", metavar="ID", help="As clients name it. Default: hub id or folder name.")
    ] = "",
    registry: Registry = REGISTRY,
    as_json: Json = False,
) -> None:
    """Register a base model by its manifest; the weights stay here."""
    folder = real(named(folder))
    manifest = manifest_with_progress(folder, quiet=as_json)
    with Client(registry=registry) as client:
        done = client.add_base(base_id or default_base_id(folder), manifest)
    if as_json:
        output.print_json(done)
        return
    base = done.base_model
    output.stdout().print(f"[bold]{escape(base.base_id)}[/] registered")
    for label, value in (
        ("digest", base.digest),
        ("model", f"{base.architecture}, {base.num_parameters / 1e6:.1f} M parameters"),
    ):
        output.stdout().print(f"  {label:<9}{escape(value)}")


@app.command("list")
def list_(registry: Registry = REGISTRY, as_json: Json = False) -> None:
    """List the registered base models."""
    with Client(registry=registry) as client:
        bases = list(client.list_bases())
    if as_json:
        output.print_json({"base_models": bases})
        return
    output.print_table(
        ["id", "architecture", "#parameters", "digest", "registered"],
        [
            (
                base.base_id,
                base.architecture,
                f"{base.num_parameters / 1e6:.1f} M",
                output.short(base.digest),
                output.when(base.create_time),
            )
            for base in bases
        ],
        empty="no base model is registered; add one with: loraplex base add DIR",
    )
