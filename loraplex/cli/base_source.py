"""Which base model is meant: a folder, a Hugging Face id, or the demo base; as a local folder and an id for clients."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from loraplex.cli.folders import named, real
from loraplex.cli.guard import guarded
from loraplex.cli.tree import find_tree
from loraplex.errors import FailedPrecondition, InvalidBaseModel, Unavailable
from loraplex.manifest import weight_files

DEMO_BASE_ID: Final = "HuggingFaceTB/SmolLM2-135M-Instruct"
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_FILES: Final = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")


@dataclass(frozen=True, slots=True)
class Base:
    """A base model on this machine and the name clients use for it."""

    folder: Path
    base_id: str


def resolve_base(source: str | None, base_id: str | None, say: Callable[[str], None]) -> Base:
    """Return the base model of `--base`: None is the demo base, a folder itself, an `owner/name` is fetched.

    `say` is told of what takes long. Raises InvalidBaseModel, FailedPrecondition or Unavailable, with the remedy.
    """
    if source is None:
        return Base(_demo_base(), base_id or DEMO_BASE_ID)
    folder = named(source)
    if source and folder.is_dir():
        folder = real(folder)
        check_folder(folder)
        return Base(folder, base_id or default_base_id(folder))
    if source and folder.exists():
        raise InvalidBaseModel(f"{folder} is a file; give the Hugging Face folder that holds it", field="base")
    if not _HUB_ID.fullmatch(source) or source.startswith((".", "/", "~")):
        raise InvalidBaseModel(
            f"{source!r} is neither a folder here nor a Hugging Face id like {DEMO_BASE_ID}", field="base"
        )
    return Base(check_folder(_from_hub(source, say)), base_id or source)


def check_folder(folder: Path) -> Path:
    """Return `folder` where it has a base model's files; their content is not looked at. Raises InvalidBaseModel."""
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise InvalidBaseModel(
                f"{folder} holds no {name}; give a Hugging Face folder with config.json, tokenizer.json and "
                "safetensors weights",
                field="base",
            )
    weight_files(folder)
    return folder


def default_base_id(folder: Path) -> str:
    """Return the id of a folder: owner/name inside the Hugging Face cache, else the folder's name."""
    for parent in folder.parents:
        if parent.name.startswith("models--") and parent.name.count("--") == 2:
            return "/".join(parent.name.split("--")[1:])
    return folder.name


def _demo_base() -> Path:
    tree = find_tree()
    command = guarded("-m", "examples.demo_base")
    made = subprocess.run(command, cwd=tree, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False)
    if made.returncode in (130, -2):
        raise KeyboardInterrupt
    if made.returncode != 0:  # it has said why on stderr, which is ours
        raise FailedPrecondition(
            "the demo base model cannot be had (see above); or give your own with --base DIR or --base OWNER/NAME"
        )
    return Path(made.stdout.strip().splitlines()[-1])


def _from_hub(hub_id: str, say: Callable[[str], None]) -> Path:
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415 - a service's dependency, not the client's
        from huggingface_hub.errors import (  # noqa: PLC0415
            GatedRepoError,
            HfHubHTTPError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
        )
    except ImportError as error:
        raise FailedPrecondition(
            f"fetching {hub_id} needs the package huggingface-hub; install it, or give a local folder with --base DIR"
        ) from error
    say(f"fetching {hub_id} from the Hugging Face hub (or its cache)")
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(_FILES)))
    except GatedRepoError as error:
        raise InvalidBaseModel(
            f"{hub_id} is gated: accept its terms on the hub and log in with `hf auth login`", field="base"
        ) from error
    except RepositoryNotFoundError as error:
        raise InvalidBaseModel(
            f"the Hugging Face hub knows no model {hub_id}, or it is private", field="base"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise Unavailable(
            f"{hub_id} is not in the local cache and the Hugging Face hub cannot be reached "
            f"({type(error).__name__}); check the network, or give a local folder with --base DIR"
        ) from error
