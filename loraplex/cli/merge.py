"""`loraplex adapter merge`: base + adapter as one model folder. `python -m common.merging` does the work."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from loraplex.cli import output
from loraplex.cli.base_source import check_folder
from loraplex.cli.folders import cache_dir, named
from loraplex.cli.guard import guarded
from loraplex.cli.options import REGISTRY, Json, Registry
from loraplex.cli.tree import find_tree
from loraplex.client import Client
from loraplex.errors import BY_REASON, AdapterNotFound, InvalidParameter, LoraplexError
from loraplex.peft_folder import read_adapter_folder
from loraplex.records import Adapter, AdapterVersion

_MIN_PREFIX: Final = 12
_CLEAN_UP_S: Final = 30.0


class Dtype(StrEnum):
    """What a merged model can be stored in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def merge(
    source: Annotated[
        str, typer.Argument(metavar="NAME|FOLDER", help="An adapter, NAME@DIGEST-PREFIX, or a PEFT folder.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; it must not exist yet.")],
    base_dir: Annotated[Path, typer.Option("--base-dir", metavar="DIR", help="The base model's folder.")],
    dtype: Annotated[
        Dtype | None, typer.Option("--dtype", help="What to store. Default: as the base is stored.", show_default=False)
    ] = None,
    artifact: Annotated[
        bool, typer.Option("--artifact", help="Merge what is served, quantized perhaps, not the exact factors.")
    ] = False,
    registry: Registry = REGISTRY,
    as_json: Json = False,
) -> None:
    """Write base + adapter as a plain Hugging Face folder, which any program loads without knowing of LoRA.

    The exact factors that the adapter was registered with are merged in float32, tensor by tensor, and stored as the
    base is. The base folder must be the one that the adapter was registered on.
    """
    tree = find_tree()
    base, out, folder = check_folder(named(base_dir)), named(out), named(source)
    command = ["--base-dir", str(base), "--out", str(out), "--cache-dir", str(cache_dir())]
    command += ["--dtype", dtype.value] if dtype is not None else []
    if folder.is_dir():
        if artifact:
            raise InvalidParameter("--artifact is for registered adapters; a folder has none", field="artifact")
        command += ["--peft-folder", str(read_adapter_folder(folder).path)]
        merged = _run(tree, command, quiet=as_json)
    else:
        with Client(registry=registry) as client, tempfile.TemporaryDirectory(prefix="loraplex-merge-") as scratch:
            name, _, prefix = source.partition("@")
            version = _version(client.get_adapter(name), prefix)
            digest = version.artifact_digest if artifact else version.exact_artifact_digest or version.artifact_digest
            file = Path(scratch) / "adapter"
            with _progress("fetching", quiet=as_json) as told:
                client.download_artifact(digest, file, told)
            merged = _run(tree, [*command, "--artifact", str(file), "--artifact-digest", digest], quiet=as_json)
    if as_json:
        output.print_json(merged)
        return
    output.stdout().print(
        f"[bold]{escape(str(merged['folder']))}[/] holds the merged model, {output.size(merged['num_bytes'])}, "
        f"{merged['num_changed']} tensors changed" + (", embedding and head apart" if merged["untied"] else "")
    )


def _version(adapter: Adapter, prefix: str) -> AdapterVersion:
    """Return the current version, or the one whose version or artifact digest begins so. Raises AdapterNotFound."""
    if not prefix:
        return adapter.current
    found = {
        version.version_digest: version
        for version in adapter.versions
        if version.version_digest.startswith(prefix) or version.artifact_digest.startswith(prefix)
    }
    if len(prefix) < _MIN_PREFIX or len(found) != 1:
        raise AdapterNotFound(
            f"{adapter.name}@{prefix} names {len(found) or 'no'} version{'s' if len(found) > 1 else ''}; give "
            f"{_MIN_PREFIX} digits or more of a digest that `loraplex adapter show {adapter.name}` tells",
            name=adapter.name,
        )
    return next(iter(found.values()))


def _run(tree: Path, options: list[str], *, quiet: bool) -> dict[str, Any]:
    """Run the merge and follow its lines. Raises the error that it tells."""
    command = guarded("-m", "common.merging", *options)
    with (
        _progress("merging", quiet=quiet) as told,
        subprocess.Popen(command, cwd=tree, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process,
    ):
        assert process.stdout is not None  # noqa: S101 - it was asked for
        try:
            for text in process.stdout:
                line = json.loads(text)
                if "error" in line:
                    raise _error(line["error"])
                if "merged" in line:
                    return dict(line["merged"])
                told(line["done"], line["total"])
        except KeyboardInterrupt:  # it was told as well, and dies with us: first it removes what it has written
            with suppress(subprocess.TimeoutExpired):
                process.wait(_CLEAN_UP_S)
            raise
    raise LoraplexError(f"the merge ended with status {process.returncode} without saying why")


def _error(told: dict[str, Any]) -> LoraplexError:
    return BY_REASON.get(told["reason"], LoraplexError)(told["message"], **told["metadata"])


@contextmanager
def _progress(what: str, *, quiet: bool) -> Iterator[Any]:
    console = output.stderr()
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
