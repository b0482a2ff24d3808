"""Fetch a base model from the Hugging Face hub into a folder; nothing is fetched twice.

Run: python docker/fetch_base.py FOLDER, in the worker's image. BASE_ID names the model, BASE_REVISION (default main)
its revision, HF_TOKEN opens gated models, HF_ENDPOINT names another hub.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


def main() -> int:
    """Return the exit status; a failure is told in one line."""
    folder, model = Path(sys.argv[1]), os.environ["BASE_ID"]
    revision = os.environ.get("BASE_REVISION") or "main"
    print(f"fetching {model} ({revision}) into {folder}", flush=True)
    try:
        snapshot_download(model, revision=revision, local_dir=folder, allow_patterns=FILES)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        print(f"{model} cannot be fetched: {error}", file=sys.stderr)
        return 1
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        print(f"{model} has no config.json with safetensors weights", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
