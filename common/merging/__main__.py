"""`python -m common.merging`: one merge, told as JSON lines on stdout; `loraplex adapter merge` runs it.

A line is {"done": bytes, "total": bytes}, and the last one {"merged": …} or {"error": …}. Exit status 0, 1 after an
error, 2 on a bad command line, 130 when interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from common.adapter_format.base import read_linears
from common.adapter_format.base_weights import BaseWeights
from common.adapter_format.packed import PackedAdapter, open_packed
from common.adapter_format.validate import validate
from common.merging.dtypes import NAMES
from common.merging.folder import write_merged
from loraplex.errors import LoraplexError
from loraplex.manifest import BaseManifest, read_manifest
from loraplex.peft_folder import CONFIG_FILE, WEIGHTS_FILE

_TELL_S = 0.1


def main(argv: Sequence[str]) -> int:
    """Merge as the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m common.merging", allow_abbrev=False)
    parser.add_argument("--base-dir", type=Path, required=True, help="Hugging Face folder of the base model")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--artifact", type=Path, help="a packed adapter")
    source.add_argument("--peft-folder", type=Path, help="an adapter as PEFT writes it")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--dtype", choices=sorted(NAMES), help="default: the base's")
    parser.add_argument("--artifact-digest", default="", help="for the record")
    parser.add_argument("--cache-dir", type=Path, help="where the base's manifest is remembered")
    options = parser.parse_args(argv)
    told_s = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal told_s
        if done == total or time.monotonic() - told_s >= _TELL_S:
            told_s = time.monotonic()
            _say({"done": done, "total": total})

    try:
        manifest = read_manifest(options.base_dir, cache_dir=options.cache_dir)
        if options.artifact:
            adapter = open_packed(options.artifact)
        else:
            adapter = _from_folder(options.peft_folder, manifest, options.base_dir)
        facts = {"artifact_digest": options.artifact_digest} if options.artifact_digest else {}
        merged = write_merged(
            options.base_dir,
            manifest,
            adapter,
            options.out,
            dtype=options.dtype,
            facts={"format": adapter.format, **facts},
            progress=progress,
        )
    except KeyboardInterrupt:
        return 130
    except LoraplexError as error:
        _say({"error": {"reason": error.reason, "message": error.message, "metadata": error.metadata}})
        return 1
    except OSError as error:
        _say({"error": {"reason": "FAILED_PRECONDITION", "message": f"{error}", "metadata": {}}})
        return 1
    _say(
        {
            "merged": {
                "folder": str(merged.folder),
                "num_bytes": merged.num_bytes,
                "num_changed": merged.num_changed,
                "untied": merged.untied,
                "base_digest": adapter.base_digest,
                "version_digest": adapter.version_digest,
                "format": adapter.format,
            }
        }
    )
    return 0


def _from_folder(folder: Path, manifest: BaseManifest, base_dir: Path) -> PackedAdapter:
    config, linears = (folder / CONFIG_FILE).read_bytes(), read_linears(manifest)
    return validate(config, folder / WEIGHTS_FILE, linears, lambda _: BaseWeights.open(base_dir))


def _say(line: dict[str, object]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
