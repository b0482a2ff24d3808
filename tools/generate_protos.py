"""Generate the gRPC stubs under loraplex/ from protos/, or verify that the committed ones are current.

Run: python -m tools.generate_protos [--check]
"""

from __future__ import annotations

import argparse
import filecmp
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
WELL_KNOWN = Path(protoc.__file__).parent / "_proto"
PLUGINS = ("protoc-gen-mypy", "protoc-gen-mypy_grpc")
"""Taken from beside the interpreter, whose folder need not be on the PATH."""


def generate(out: Path) -> list[Path]:
    """Write all stubs below `out` and return their paths relative to it, sorted."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    status = protoc.main(
        [
            "protoc",
            f"-I{PROTOS}",
            f"-I{WELL_KNOWN}",
            *(f"--plugin={name}={Path(sys.executable).parent / name}" for name in PLUGINS),
            f"--python_out={out}",
            f"--grpc_python_out={out}",
            f"--mypy_out=quiet:{out}",
            f"--mypy_grpc_out=quiet:{out}",
            *sources,
        ]
    )
    if status != 0:
        raise SystemExit(f"protoc failed with status {status}; its messages are above")
    for stub in (path for path in out.rglob("*_pb2_grpc.py*") if "Stub" not in path.read_text()):
        stub.unlink()  # messages only: an empty service file is noise
    for directory in {path.parent for path in out.rglob("*_pb2.py")}:
        for package in (directory, directory.parent):
            (package / "__init__.py").touch()
    return sorted(path.relative_to(out) for path in out.rglob("*") if path.is_file() and path.suffix in {".py", ".pyi"})


def main() -> int:
    """Generate, or with --check compare a fresh generation with the committed files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="fail when the committed stubs are not current")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch)
        files = generate(fresh)
        if check:
            stale = [f for f in files if not (ROOT / f).exists() or not filecmp.cmp(fresh / f, ROOT / f, shallow=False)]
            committed = {
                path.relative_to(ROOT)
                for path in (ROOT / "loraplex").rglob("*_pb2*.py*")
                if "__pycache__" not in path.parts
            }
            orphans = sorted(committed - set(files))
            for name in stale:
                print(f"stale: {name}", file=sys.stderr)
            for name in orphans:
                print(f"no proto for: {name}", file=sys.stderr)
            if stale or orphans:
                print("run `make proto` and commit the result", file=sys.stderr)
                return 1
            return 0
        for name in files:
            target = ROOT / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((fresh / name).read_bytes())
    print(f"generated {len(files)} files under loraplex/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
