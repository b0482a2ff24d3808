"""Registering for the command line: an upload or an import, with a bar that tells how far it is."""

from __future__ import annotations

import re
from typing import Final

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from loraplex.cli import output
from loraplex.cli.folders import named
from loraplex.client import Client
from loraplex.digests import is_digest
from loraplex.errors import CorruptArtifact, InvalidParameter
from loraplex.peft_folder import WEIGHTS_FILE, AdapterFolder, read_adapter_folder
from loraplex.records import AdapterRegistration, ImportProgress

_FETCHED: Final = re.compile(r"file:|[A-Za-z][A-Za-z0-9+.-]*://")
"""How a source begins that the registry fetches; anything else is a folder here."""


def register(
    client: Client, name: str, source: str, base_id: str, quantization: str, sha256: str = "", *, quiet: bool
) -> AdapterRegistration:
    """Upload the folder that `source` names, or have the registry fetch it.

    Raises CorruptArtifact where the weights have not the SHA-256 that is given.
    """
    console = output.stderr()
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
        console=console, transient=True, disable=quiet or not console.is_terminal,
    )  # fmt: skip
    if not _FETCHED.match(source):
        folder = read_adapter_folder(named(source))
        _check_weights(folder, sha256)
        with bar:
            task = bar.add_task("uploading", total=folder.size_bytes)
            return client.add_adapter(
                name,
                folder.path,
                base_id=base_id,
                quantization=quantization,
                progress=lambda num_bytes: bar.advance(task, num_bytes),
            )
    with bar:
        task = bar.add_task("fetching", total=None)

        def tell(progress: ImportProgress) -> None:
            total = progress.total_bytes or None
            is_whole = progress.received_bytes == total
            bar.update(
                task,
                completed=progress.received_bytes,
                total=total,
                description="checking and packing" if is_whole else "fetching",
            )

        return client.import_adapter(
            name, source, base_id=base_id, quantization=quantization, weights_sha256=sha256, progress=tell
        )


def _check_weights(folder: AdapterFolder, sha256: str) -> None:
    """Hold a folder of this machine against the SHA-256 that its weights must have, if one is given."""
    if not sha256:
        return
    if not is_digest(sha256):
        raise InvalidParameter("--sha256 is no SHA-256; give its 64 hex digits in lower case", field="sha256")
    actual = next(file.sha256 for file in folder.files if file.name == WEIGHTS_FILE)
    if actual != sha256:
        raise CorruptArtifact(
            f"{WEIGHTS_FILE} of {folder.path} has SHA-256 {actual[:12]}..., and {sha256[:12]}... was asked for",
            file=WEIGHTS_FILE,
            field="sha256",
        )
